from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs_localize.design import balanced_masks, bernoulli_masks, inclusion_rates
from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape

SHAPE = ModelShape(layers=10, heads=6, kv_heads=3, head_dim=8, ffn=16)


def test_rates_are_lower_in_fragile_layers_and_add_up_to_the_heads_of_a_mask() -> None:
    rates = inclusion_rates(SHAPE, 0.1, fragile_layers=[0, 3], fragile_density=0.02)
    assert rates.shape == (60,)
    assert rates.reshape(10, 6)[[0, 3]] == pytest.approx(0.02)
    assert rates.sum() == pytest.approx(8 * 6 * 0.1 + 2 * 6 * 0.02)


def test_the_rates_of_some_layers_can_be_given_whether_they_are_fragile_or_not() -> None:
    rates = inclusion_rates(SHAPE, 0.1, [0, 3], 0.02, {3: 0.3, 5: 0.0}).reshape(10, 6)
    assert rates[[0, 1, 3, 5], 0] == pytest.approx([0.02, 0.1, 0.3, 0.0])
    with pytest.raises(UsageError, match="no layer 10"):
        inclusion_rates(SHAPE, 0.1, given={10: 0.1})
    with pytest.raises(UsageError, match="from 0 to 1"):
        inclusion_rates(SHAPE, 0.1, given={1: 1.1})


@pytest.mark.parametrize(
    ("density", "fragile", "fragile_density", "message"),
    [
        (0.0, [], 0.01, "density is 0.0"),
        (1.2, [], 0.01, "density is 1.2"),
        (0.1, [], -0.1, "fragile density is -0.1"),
        (0.1, [10], 0.01, "no layer 10"),
        (0.1, [-1], 0.01, "no layer -1"),
    ],
)
def test_impossible_rates_are_usage_errors(
    density: float, fragile: list[int], fragile_density: float, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        inclusion_rates(SHAPE, density, fragile, fragile_density)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 200),
    st.floats(0.04, 0.5),  # at least one head a mask, whatever the fragile layers get
    st.sampled_from([0.0, 0.003, 0.02, 0.3]),
    st.integers(0, 5),
)
def test_balanced_masks_have_equal_sizes_and_keep_every_heads_rate(
    seed: int, n_masks: int, density: float, fragile_density: float, fragile: int
) -> None:
    rates = inclusion_rates(SHAPE, density, range(fragile), fragile_density)
    masks = balanced_masks(rates, n_masks, np.random.default_rng(seed))
    sizes = masks.sum(axis=1)
    assert masks.shape == (n_masks, 60)
    assert sizes.max() - sizes.min() <= 1
    assert abs(sizes.sum() - n_masks * rates.sum()) < 1 + 1e-6
    assert np.abs(masks.sum(axis=0) - n_masks * rates).max() < 2.5


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 200), st.floats(0.03, 0.9))
def test_balanced_masks_of_one_rate_use_no_head_twice_more_than_another(
    seed: int, n_masks: int, density: float
) -> None:
    masks = balanced_masks(inclusion_rates(SHAPE, density), n_masks, np.random.default_rng(seed))
    uses = np.cumsum(masks, axis=0)
    assert (uses.max(axis=1) - uses.min(axis=1)).max() <= 1


def test_rare_heads_are_spread_over_balanced_masks_rather_than_taken_together() -> None:
    rates = inclusion_rates(ModelShape(30, 9, 3, 64, 128), 0.06, [0, 1, 2], 0.015)
    masks = balanced_masks(rates, 600, np.random.default_rng(0))
    rare = masks[:, :27].sum(axis=1)
    assert rare.mean() == pytest.approx(27 * 0.015, abs=0.02)
    assert rare.max() <= 4


def test_bernoulli_masks_follow_their_rates() -> None:
    rates = inclusion_rates(SHAPE, 0.2, [0], 0.05)
    masks = bernoulli_masks(rates, 4000, np.random.default_rng(0))
    assert np.abs(masks.mean(axis=0) - rates).max() < 0.03
    assert len(set(masks.sum(axis=1).tolist())) > 5


@pytest.mark.parametrize("draw", [balanced_masks, bernoulli_masks])
def test_equal_seeds_give_equal_masks_and_others_do_not(draw: type[object]) -> None:
    rates = inclusion_rates(SHAPE, 0.1)
    first, again, other = (draw(rates, 50, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("draw", [balanced_masks, bernoulli_masks])
def test_a_density_below_one_head_a_mask_is_a_usage_error(draw: type[object]) -> None:
    with pytest.raises(UsageError, match="raise the density"):
        draw(inclusion_rates(SHAPE, 0.01), 50, np.random.default_rng(0))
    with pytest.raises(UsageError, match="at least one"):
        draw(inclusion_rates(SHAPE, 0.1), 0, np.random.default_rng(0))
    with pytest.raises(UsageError, match="between 0 and 1"):
        draw(np.full(60, 1.5), 10, np.random.default_rng(0))
