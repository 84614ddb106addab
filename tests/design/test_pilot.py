from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cs_localize.design import Design, fragile_layers, pilot_design
from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.outcomes import MeasurementTable
from tests.recover.builders import SMALL_REAL, TASKS, measure_designs, planted_engine

SHAPE = ModelShape(layers=6, heads=4, kv_heads=2, head_dim=8, ffn=16)


def table_of(design: Design, damage: np.ndarray) -> MeasurementTable:
    rows = len(design)
    zeros = np.zeros(rows)
    return MeasurementTable(
        SHAPE, ("a",), np.zeros(rows, int), design.items, design.masks, -damage, zeros, zeros > 1, np.ones(rows, int)
    )


def test_a_pilot_request_knocks_out_heads_of_one_layer_and_layers_take_turns() -> None:
    design = pilot_design(SHAPE, n_items=5, requests_a_layer=3, heads_a_mask=2, rng=np.random.default_rng(0))
    by_layer = design.masks.reshape(18, 6, 4).sum(axis=2)
    assert by_layer.sum(axis=1).tolist() == [2] * 18
    assert by_layer.argmax(axis=1).tolist() == [*range(6)] * 3
    counts = np.bincount(design.items, minlength=5)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("heads", [0, 5])
def test_a_pilot_of_more_heads_than_a_layer_has_is_a_usage_error(heads: int) -> None:
    with pytest.raises(UsageError, match="choose 1 to 4"):
        pilot_design(SHAPE, 5, 3, heads, np.random.default_rng(0))


def test_fragile_layers_stand_out_from_the_others_and_exceed_the_least_damage() -> None:
    design = pilot_design(SHAPE, 5, 3, 2, np.random.default_rng(0))
    layer = np.arange(18) % 6
    quiet = 0.01 * (layer + 1)
    assert fragile_layers(table_of(design, np.where(layer == 1, 3.0, quiet))) == (1,)
    assert fragile_layers(table_of(design, np.where(layer == 1, 0.2, quiet))) == ()
    assert fragile_layers(table_of(design, 2.0 + quiet)) == (), "all alike: none stands out"


def test_the_layers_of_planted_universal_heads_are_fragile_and_no_others() -> None:
    for seed in range(3):
        engine = planted_engine(seed=seed)
        designs = {
            task: pilot_design(SMALL_REAL, 40, 4, 3, np.random.default_rng([seed, number]))
            for number, task in enumerate(TASKS)
        }
        found = fragile_layers(measure_designs(engine, designs), least=0.8)
        assert found
        assert set(found) <= {head.layer for head in engine.universal()}


def test_a_layer_that_one_task_alone_depends_on_is_not_fragile() -> None:
    design = pilot_design(SHAPE, 5, 3, 2, np.random.default_rng(0))
    layer = np.arange(18) % 6
    tables = [
        table_of(design, np.where(layer == own, 6.0, 0.01 * (layer + 1)) + 2.0 * (layer == 0)) for own in (2, 3, 4)
    ]
    merged = replace(
        tables[0],
        tasks=("a", "b", "c"),
        task=np.repeat([0, 1, 2], 18),
        **{
            name: np.concatenate([getattr(table, name) for table in tables])
            for name in ("item", "masks", "score", "baseline", "correct", "tokens")
        },
    )
    assert fragile_layers(merged) == (0,)


def test_a_table_of_another_design_is_a_usage_error() -> None:
    design = pilot_design(SHAPE, 5, 3, 2, np.random.default_rng(0))
    table = table_of(design, np.zeros(18))
    masks = table.masks.copy()
    masks[4] = True
    with pytest.raises(UsageError, match="exactly one layer"):
        fragile_layers(replace(table, masks=masks))
    with pytest.raises(UsageError, match="no request for layer 5 of task 'a'"):
        fragile_layers(table.take(np.flatnonzero(np.arange(18) % 6 != 5)))
