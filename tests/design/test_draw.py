from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs_localize.design import Design, cycle_items, draw_design, inclusion_rates
from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape

RATES = inclusion_rates(ModelShape(layers=10, heads=6, kv_heads=3, head_dim=8, ffn=16), 0.1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 300), st.integers(1, 40), st.integers(1, 40))
def test_items_take_turns_and_never_repeat_within_a_block(seed: int, requests: int, items: int, block: int) -> None:
    block = min(block, items)
    order = cycle_items(requests, items, block, np.random.default_rng(seed))
    counts = np.bincount(order, minlength=items)
    assert len(order) == requests
    assert counts.max() - counts.min() <= 1
    for start in range(0, requests, block):
        asked = order[start : start + block].tolist()
        assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("kind", ["balanced", "bernoulli"])
def test_every_request_has_a_fresh_mask_where_the_unit_is_a_request(kind: str) -> None:
    design = draw_design(kind, "request", RATES, 200, 30, 8, np.random.default_rng(0))  # type: ignore[arg-type]  # literal
    assert len(np.unique(design.masks, axis=0)) == 200
    assert len(design) == 200


def test_a_block_shares_one_mask_and_the_last_block_may_be_cut_short() -> None:
    design = draw_design("balanced", "block", RATES, 50, 30, 8, np.random.default_rng(0))
    assert len(design) == 50
    for start in range(0, 50, 8):
        assert len(np.unique(design.masks[start : start + 8], axis=0)) == 1
    assert len(np.unique(design.masks, axis=0)) == 7


def test_equal_seeds_give_equal_designs() -> None:
    first, again = (draw_design("balanced", "request", RATES, 90, 30, 1, np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(first.masks, again.masks)
    assert np.array_equal(first.items, again.items)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "random"}, "no design 'random'; choose balanced or bernoulli"),
        ({"unit": "batch"}, "no unit 'batch' for masks; choose request or block"),
        ({"n_requests": 0}, "must all be at least 1"),
        ({"unit": "block", "block": 31}, "a block of 31 items needs as many search items; there are 30"),
    ],
)
def test_impossible_designs_are_usage_errors(change: dict[str, object], message: str) -> None:
    arguments = {"kind": "balanced", "unit": "request", "n_requests": 50, "n_items": 30, "block": 8, **change}
    with pytest.raises(UsageError, match=message):
        draw_design(rates=RATES, rng=np.random.default_rng(0), **arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_coverage_counts_distinct_masks_as_tests_and_finds_confounded_heads() -> None:
    masks = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 1, 0]], dtype=bool)
    coverage = Design(masks, np.arange(4)).coverage()
    assert coverage.tests_min == 0
    assert coverage.tests_mean == pytest.approx((2 + 2 + 2 + 0) / 4)
    assert coverage.overlap == pytest.approx((0 + 2 + 1) / 3)
    assert coverage.coherence == pytest.approx(1.0)
    assert coverage.warning is not None
    assert coverage.warning.startswith("4 of 4 heads have fewer than 5 tests")


def test_coverage_warns_only_below_five_tests_a_head() -> None:
    enough, too_few = (
        draw_design("balanced", "request", RATES, n, 30, 1, np.random.default_rng(0)).coverage() for n in (50, 40)
    )
    assert enough.tests_min == 5
    assert enough.warning is None
    assert too_few.tests_min == 4
    assert too_few.warning is not None


def test_balanced_masks_are_less_coherent_than_blocks_of_the_same_size() -> None:
    fresh = draw_design("balanced", "request", RATES, 400, 40, 1, np.random.default_rng(0)).coverage()
    blocks = draw_design("balanced", "block", RATES, 400, 40, 10, np.random.default_rng(0)).coverage()
    assert fresh.coherence < blocks.coherence


def test_masks_and_items_of_different_length_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="one mask and one item a request"):
        Design(np.zeros((3, 4), dtype=bool), np.arange(2))
