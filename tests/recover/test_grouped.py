from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.base import clone

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover import SOLVERS, GroupSolver, bootstrap_intervals, make_solver, selection_frequencies
from cs_localize.recover.grouped import grouped

SHAPE = ModelShape(layers=5, heads=6, kv_heads=2, head_dim=8, ffn=16)
every = pytest.mark.parametrize("name", list(SOLVERS))


def table(rows: int = 300) -> MeasurementTable:
    """The second group costs 3 nats, the eighth 1.5."""
    rng = np.random.default_rng(0)
    groups = rng.random((rows, 10)) < 0.2
    damage = 3.0 * groups[:, 1] + 1.5 * groups[:, 7] + rng.normal(0, 0.1, rows)
    zeros, numbers = np.zeros(rows), np.zeros(rows, dtype=np.int64)
    masks = np.repeat(groups, 3, axis=1)
    return MeasurementTable(SHAPE, ("a",), numbers, np.arange(rows), masks, -damage, zeros, zeros > 1, numbers)


@every
def test_the_heads_of_a_group_share_its_effect_evenly_and_predict_what_the_group_does(name: str) -> None:
    solver = GroupSolver(make_solver(name)).fit(table())
    effects = solver.effects_.reshape(10, 3)
    assert (effects == effects[:, :1]).all()
    assert np.argsort(-effects[:, 0])[:2].tolist() == [1, 7]
    assert effects.sum(axis=1) == pytest.approx(make_solver(name).fit(grouped(table())).effects_[0])
    assert solver.untested_.shape == (1, 30)
    assert np.corrcoef(solver.predict(table()), table().damage())[0, 1] > 0.95


def test_it_is_an_estimator_that_resamples_and_refits_know() -> None:
    solver = GroupSolver(make_solver("lasso", floor=5.0))
    assert solver.get_params()["floor"] == 5.0
    copy = clone(solver).fit(table())
    assert not hasattr(solver, "effects_")
    heads = np.array([3, 4, 5])
    intervals = bootstrap_intervals(table(), copy, heads, 20, np.random.default_rng(0))
    assert intervals.effect[0] == pytest.approx([1.0] * 3, abs=0.05)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_as_many_groups_are_selected_as_heads_would_be_and_none_in_part(most: int) -> None:
    solver = GroupSolver(make_solver("ridge"))
    frequency = selection_frequencies(table(), solver, 10, np.random.default_rng(0), most).reshape(10, 3)
    assert (frequency == frequency[:, :1]).all()
    assert frequency[:, 0].sum() == pytest.approx(most), "a ridge has many effects above 0"
    assert (frequency[[1, 7][:most]] == 1.0).all()


def test_masks_that_take_a_group_apart_are_refused() -> None:
    masks = table().masks.copy()
    masks[4, 0] = ~masks[4, 0]
    with pytest.raises(UsageError, match="masks that knock out whole groups"):
        GroupSolver(make_solver("lasso")).fit(replace(table(), masks=masks))
