"""Masks held sparsely give what the same masks give as a plain array."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import Lasso

from cs_localize.recover import LassoSolver, selection_frequencies
from cs_localize.recover.arrays import sparse_masks, task_arrays
from tests.recover.test_solvers import additive_table


@pytest.mark.parametrize("density", [0.0, 0.06, 0.5, 1.0])
def test_a_sparse_matrix_has_a_one_wherever_a_mask_has_a_head(density: float) -> None:
    masks = np.random.default_rng(0).random((70, 41)) < density
    assert np.array_equal(sparse_masks(masks).toarray(), masks.astype(float))


def test_moments_rates_and_penalties_are_those_of_the_plain_columns() -> None:
    for arrays in task_arrays(additive_table(), 6.0):
        plain = arrays.masks.toarray()
        both = np.cov(np.column_stack([plain, arrays.damage]).T, bias=True)
        gram, cross = arrays.moments()
        np.testing.assert_allclose(gram, both[:-1, :-1], atol=1e-12)
        np.testing.assert_allclose(cross, both[:-1, -1], atol=1e-12)
        relative = plain.std(axis=0) / np.median(plain.std(axis=0))
        np.testing.assert_allclose(arrays.penalties(0.01), 0.01 * (1000 / len(plain)) ** 0.5 * relative)


def plain_lasso(table, solver):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """The Lasso on arrays that are not sparse."""
    effects = []
    for arrays in task_arrays(table, solver.floor):
        masks, damage = arrays.masks.toarray(), arrays.damage
        penalties = arrays.penalties(solver.alpha)
        scale = penalties / np.median(penalties)
        lasso = Lasso(alpha=float(np.median(penalties)), max_iter=5000, tol=1e-6)
        lasso.fit(masks / scale, (damage - damage.mean()) / damage.std())
        effects.append(lasso.coef_ / scale * damage.std())
    return np.stack(effects)


def test_every_resample_has_the_effects_of_a_lasso_on_plain_arrays() -> None:
    worst = []

    class Compared(LassoSolver):
        def fit(self, table):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            fitted = super().fit(table)
            worst.append(np.abs(fitted.effects_ - plain_lasso(table, self)).max())
            return fitted

    selection_frequencies(additive_table(noise=1.0), Compared(), 5, np.random.default_rng(0))
    assert len(worst) == 5
    assert max(worst) < 1e-9
