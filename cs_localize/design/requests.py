"""A design: the mask and the item of every request, and what that tells about every head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError

FEWEST_TESTS = 5
"""Recovery is poor for heads that are tested less often than this."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How well a design tests the heads. A test of a head is one distinct mask that knocks it out.

    Attributes:
        tests_min: tests of the head tested least.
        tests_mean: tests a head, on average.
        overlap: heads that two different masks have in common, on average.
        coherence: largest absolute correlation between two heads' columns over the requests, 0 to 1; two heads at 1
            cannot be told apart.
        warning: one line where some head has fewer than five tests, otherwise None.
    """

    tests_min: int
    tests_mean: float
    overlap: float
    coherence: float
    warning: str | None


@dataclass(frozen=True)
class Design:
    """Every request of one task.

    Attributes:
        masks: ``[requests, n_heads]`` bool, True where the head is knocked out.
        items: ``[requests]`` int, position in the task's list of search items.
    """

    masks: NDArray[np.bool_]
    items: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.masks.ndim != 2 or self.items.shape != (len(self.masks),):
            raise UsageError(
                f"a design has one mask and one item a request, not {self.masks.shape}, {self.items.shape}"
            )

    def __len__(self) -> int:
        return len(self.items)

    def coverage(self) -> Coverage:
        """Counts the tests of every head and how far heads are confounded."""
        packed = np.unique(np.packbits(self.masks, axis=1), axis=0)
        distinct = np.unpackbits(packed, axis=1, count=self.masks.shape[1])
        tests = distinct.sum(axis=0, dtype=np.int64)
        pairs = len(distinct) * (len(distinct) - 1)
        few = int((tests < FEWEST_TESTS).sum())
        warning = (
            f"{few} of {len(tests)} heads have fewer than {FEWEST_TESTS} tests; raise the requests or the density"
            if few
            else None
        )
        return Coverage(
            tests_min=int(tests.min()),
            tests_mean=float(tests.mean()),
            overlap=float((tests * (tests - 1)).sum() / pairs) if pairs else 0.0,
            coherence=_coherence(self.masks),
            warning=warning,
        )


def joined(designs: Sequence[Design]) -> Design:
    """The requests of some designs, one or more, one design after another."""
    return Design(
        np.concatenate([design.masks for design in designs]), np.concatenate([design.items for design in designs])
    )


def cycle_items(n_requests: int, n_items: int, block: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """The item of every request: all items in random order, then all again in another order.

    Args:
        n_requests: length of the result.
        n_items: items to choose from.
        block: consecutive requests that never repeat an item; blocks start at multiples of it.
        rng: source of the orders.

    Returns:
        ``[n_requests]`` int. How often two items occur differs by at most one.

    Raises:
        UsageError: if a count is below one or a block is longer than the list of items.
    """
    if min(n_requests, n_items, block) < 1:
        raise UsageError(f"requests ({n_requests}), items ({n_items}) and block ({block}) must all be at least 1")
    if block > n_items:
        raise UsageError(f"a block of {block} items needs as many search items; there are {n_items}")
    order = np.empty(0, dtype=np.int64)
    while len(order) < n_requests:
        cycle = rng.permutation(n_items)
        opened = order[len(order) // block * block :]
        asked = np.isin(cycle, opened)
        order = np.concatenate([order, cycle[~asked], cycle[asked]])
    return order[:n_requests]


def _coherence(masks: NDArray[np.bool_]) -> float:
    # Single precision: the heads of a large model make a matrix that is slow and large enough.
    varied = masks[:, masks.any(axis=0) & ~masks.all(axis=0)]
    columns = varied.astype(np.float32) - varied.mean(axis=0, dtype=np.float32)
    columns /= np.linalg.norm(columns, axis=0)
    correlation = columns.T @ columns
    np.abs(correlation, out=correlation)
    np.fill_diagonal(correlation, 0.0)
    return float(min(correlation.max(initial=0.0), 1.0))
