"""Draws the design of one task."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cs_localize.design.masks import balanced_masks, bernoulli_masks
from cs_localize.design.requests import Design, cycle_items
from cs_localize.errors import UsageError

Kind = Literal["balanced", "bernoulli"]
Unit = Literal["request", "block"]

_DRAW = {"balanced": balanced_masks, "bernoulli": bernoulli_masks}


def draw_design(
    kind: Kind,
    unit: Unit,
    rates: NDArray[np.float64],
    n_requests: int,
    n_items: int,
    block: int,
    rng: np.random.Generator,
) -> Design:
    """Draws the masks and the items of one task's requests.

    Args:
        kind: ``balanced`` (masks of equal size, heads in turn) or ``bernoulli`` (every head independently).
        unit: what shares a mask: one ``request``, or a ``block`` of different items.
        rates: ``[n_heads]`` share of masks that knocks out each head.
        n_requests: requests in all; the last block may be cut short.
        n_items: search items of the task.
        block: items asked under one mask where the unit is a block.
        rng: the design's own generator; equal seeds give equal designs.

    Returns:
        A design in which the items' counts differ by at most one.

    Raises:
        UsageError: on an unknown kind or unit, or counts and rates that make no design.
    """
    if kind not in _DRAW:
        raise UsageError(f"no design '{kind}'; choose {' or '.join(_DRAW)}")
    if unit not in get_args(Unit):
        raise UsageError(f"no unit '{unit}' for masks; choose {' or '.join(get_args(Unit))}")
    length = block if unit == "block" else 1
    items = cycle_items(n_requests, n_items, length, rng)
    masks = _DRAW[kind](rates, -(-n_requests // length), rng)
    return Design(np.repeat(masks, length, axis=0)[:n_requests], items)


def given_design(
    masks: NDArray[np.bool_], unit: Unit, n_requests: int, n_items: int, block: int, rng: np.random.Generator
) -> Design:
    """Draws the items of one task's requests under masks that are given.

    Args:
        masks: ``[masks, n_heads]``, used in this order, and again from the first where they are fewer than needed.
        unit: what shares a mask: one ``request``, or a ``block`` of different items.
        n_requests: requests in all; the last block may be cut short.
        n_items: search items of the task.
        block: items asked under one mask where the unit is a block.
        rng: decides the items.

    Raises:
        UsageError: on counts that make no design, or more requests than masks and items make different ones.
    """
    if n_requests > len(masks) * n_items:
        raise UsageError(
            f"{len(masks)} masks and {n_items} items make {len(masks) * n_items} different requests, and {n_requests} "
            "were asked for; lower design.requests"
        )
    length = block if unit == "block" else 1
    items = cycle_items(n_requests, n_items, length, rng)
    return Design(masks[np.arange(n_requests) // length % len(masks)], items)
