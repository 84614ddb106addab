"""Random masks: how often every head is knocked out, and with which others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape


def inclusion_rates(
    shape: ModelShape,
    density: float,
    fragile_layers: Collection[int] = (),
    fragile_density: float = 0.015,
    given: Mapping[int, float] = MappingProxyType({}),
) -> NDArray[np.float64]:
    """The share of masks that knocks out each head.

    Args:
        shape: geometry of the model.
        density: share for every head outside the fragile layers, above 0 and at most 1.
        fragile_layers: layers whose heads hurt every task, and are therefore knocked out less often.
        fragile_density: share for the heads of those layers, from 0 to 1.
        given: share for the heads of some layers, fragile or not, from 0 to 1.

    Returns:
        ``[n_heads]``; the sum is the number of heads a mask knocks out on average.

    Raises:
        UsageError: if a density is out of range or the model lacks a layer.
    """
    if not 0 < density <= 1:
        raise UsageError(f"density is {density}; choose a share of heads above 0 and at most 1")
    if not 0 <= fragile_density <= 1:
        raise UsageError(f"fragile density is {fragile_density}; choose a share of heads from 0 to 1")
    if not all(0 <= share <= 1 for share in given.values()):
        raise UsageError("the density of a layer must be a share of its heads from 0 to 1")
    outside = sorted(layer for layer in (*fragile_layers, *given) if not 0 <= layer < shape.layers)
    if outside:
        raise UsageError(f"there is no layer {outside[0]}: this model has layers 0..{shape.layers - 1}")
    rates = np.full((shape.layers, shape.heads), density)
    rates[sorted(fragile_layers)] = fragile_density
    for layer, share in given.items():
        rates[layer] = share
    return rates.reshape(-1)


def balanced_masks(rates: NDArray[np.float64], n_masks: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Masks of equal size that take every head in turn: those used least so far, relative to their rate.

    Each use of a head falls due at a random moment of its own span of ``1 / rate`` masks; a mask takes the heads that
    are due first. With one rate for all heads this is the stratified design of Bair et al. (arXiv 2603.03335):
    the least used heads first, ties at random. With several rates the rare heads come spread over the masks rather
    than all at once.

    Args:
        rates: ``[n_heads]`` share of masks that knocks out each head.
        n_masks: how many masks.
        rng: source of the ties.

    Returns:
        ``[n_masks, n_heads]`` bool. Row sizes differ by at most one; column sums lie near ``n_masks * rates``.

    Raises:
        UsageError: if the rates add up to less than one head a mask.
    """
    _check_rates(rates, n_masks)
    n_heads = len(rates)
    sizes = np.diff(np.floor(rates.sum() * np.arange(n_masks + 1) + 1e-9).astype(int))
    spans = np.divide(1.0, rates, out=np.full(n_heads, np.inf), where=rates > 0)
    uses = np.zeros(n_heads)
    due = rng.random(n_heads) * spans
    masks = np.zeros((n_masks, n_heads), dtype=bool)
    for mask, size in zip(masks, sizes, strict=True):
        taken = np.argsort(due)[:size]
        mask[taken] = True
        uses[taken] += 1
        due[taken] = (uses[taken] + rng.random(size)) * spans[taken]
    return masks


def bernoulli_masks(rates: NDArray[np.float64], n_masks: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Masks that knock out every head independently, with probability ``rates``.

    Returns:
        ``[n_masks, n_heads]`` bool.

    Raises:
        UsageError: if the rates add up to less than one head a mask.
    """
    _check_rates(rates, n_masks)
    return rng.random((n_masks, len(rates))) < rates


def _check_rates(rates: NDArray[np.float64], n_masks: int) -> None:
    if n_masks < 1:
        raise UsageError(f"{n_masks} masks were asked for; at least one is needed")
    if not (np.all(rates >= 0) and np.all(rates <= 1)):
        raise UsageError("every head's rate must lie between 0 and 1")
    if rates.sum() < 1:
        raise UsageError(f"a mask would knock out {rates.sum():.2f} heads on average; raise the density to reach one")
