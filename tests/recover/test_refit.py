from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cs_localize.recover import TaskArrays, refit_heads, undecided_heads
from cs_localize.recover.arrays import sparse_masks


def arrays(effects: NDArray[np.float64], rows: int, noise: float, seed: int = 0) -> TaskArrays:
    """Damage that is the sum of the effects of the heads knocked out, plus noise."""
    rng = np.random.default_rng(seed)
    masks = rng.random((rows, len(effects))) < 0.2
    return TaskArrays(sparse_masks(masks), masks @ effects + rng.normal(0, noise, rows), np.arange(rows))


TRUE = np.array([2.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0])


def test_the_heads_that_are_refitted_lose_the_shrinkage_and_the_others_keep_their_effects() -> None:
    shrunk = 0.5 * TRUE
    refitted = refit_heads(arrays(TRUE, 400, 0.1), shrunk, np.array([0, 1]), {})
    np.testing.assert_allclose(refitted[:2], TRUE[:2], atol=0.1)
    np.testing.assert_array_equal(refitted[2:], shrunk[2:])


def test_damage_of_heads_alone_settles_what_few_noisy_masks_leave_open() -> None:
    errors = []
    for seed in range(20):
        noisy = arrays(TRUE, 12, 2.0, seed)
        alone = {head: np.full(6, TRUE[head]) for head in range(4)}
        masks_only, both = (refit_heads(noisy, np.zeros(8), np.arange(4), given) for given in ({}, alone))
        errors.append([np.abs(fit[:4] - TRUE[:4]).mean() for fit in (masks_only, both)])
    masks_only, both = np.mean(errors, axis=0)
    assert both < 0.2 < masks_only


def test_a_head_that_was_never_knocked_out_has_no_effect() -> None:
    seen = arrays(TRUE, 50, 0.1)
    masks = seen.masks.toarray().astype(bool)
    masks[:, 2] = False
    seen = replace(seen, masks=sparse_masks(masks))
    assert abs(refit_heads(seen, np.zeros(8), np.array([0, 2]), {})[2]) < 1e-9


def undecided(means: list[float], items: int, confidence: float = 0.95, deviation: float = 0.5) -> list[bool]:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, deviation, (len(means), items))
    damage = np.array(means)[:, None] + noise - noise.mean(axis=1, keepdims=True)
    return undecided_heads(damage, np.array(means), 1.0, 2, confidence, np.random.default_rng(1)).tolist()


def test_heads_far_from_the_border_are_decided_and_those_at_it_are_not() -> None:
    assert undecided([9.0, 5.0, 4.9, 0.0], 16) == [False, True, True, False]


def test_two_heads_that_may_both_be_the_first_are_undecided_though_both_belong() -> None:
    assert undecided([5.0, 5.1, 0.0, 0.1], 16) == [True, True, False, False]


def test_on_few_items_or_without_any_difference_nothing_is_decided() -> None:
    assert all(undecided([9.0, 5.0, 3.0, 0.0], 5))
    zeros = np.zeros((3, 8))
    assert undecided_heads(zeros, zeros[:, 0], 0.0, 1, 0.95, np.random.default_rng(0)).all()


def test_more_confidence_leaves_more_undecided() -> None:
    means = [4.0, 3.6, 3.3, 3.0, 2.7, 2.4, 1.0]
    few, many = (undecided(means, 12, confidence, 1.5) for confidence in (0.6, 0.99))
    assert sum(few) < sum(many)
    assert all(late or not early for early, late in zip(few, many, strict=True))
