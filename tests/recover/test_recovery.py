"""From planted heads through design and measurement back to the heads, at the size of the small real model."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from cs_localize.design import draw_design, inclusion_rates
from cs_localize.measure.planted import PlantedEngine
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover import SOLVERS, make_solver, rank_heads, specificity, universal_heads
from tests.recover.builders import SMALL_REAL, TASKS, measure_designs, planted_engine

SEEDS = range(3)
SPARSE = [name for name in SOLVERS if name not in ("ridge", "marginal")]


@cache
def measured(seed: int, requests: int) -> tuple[PlantedEngine, MeasurementTable]:
    engine = planted_engine(seed=seed)
    rates = inclusion_rates(SMALL_REAL, 0.06, fragile_layers=[0, 1, 2], fragile_density=0.015)
    designs = {
        task: draw_design("balanced", "request", rates, requests, 60, 1, np.random.default_rng([seed, number]))
        for number, task in enumerate(TASKS)
    }
    return engine, measure_designs(engine, designs)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize(("requests", "least"), [(600, 16), (1200, 17)])
def test_the_strongest_specific_head_of_nearly_every_task_comes_first(name: str, requests: int, least: int) -> None:
    first = 0
    for seed in SEEDS:
        engine, table = measured(seed, requests)
        effects = make_solver(name).fit(table).effects_
        order = rank_heads(specificity(effects, TASKS, {}).strongest, effects)
        for row, task in zip(order, TASKS, strict=True):
            first += SMALL_REAL.head(row[0]) == next(iter(engine.truth(task)))
    assert first >= least, f"{first} of {len(SEEDS) * len(TASKS)} tasks"


@pytest.mark.parametrize("name", SPARSE)
def test_universal_heads_are_listed_and_none_of_the_specific_ones(name: str) -> None:
    found = set()
    for seed in SEEDS:
        engine, table = measured(seed, 1200)
        heads = {SMALL_REAL.head(int(i)) for i in universal_heads(make_solver(name).fit(table).effects_)}
        assert heads <= set(engine.universal())
        found |= {(seed, head) for head in heads}
    assert len(found) >= 8


def test_ranking_by_effect_alone_puts_universal_heads_among_the_first() -> None:
    engine, table = measured(0, 1200)
    effects = make_solver("lasso").fit(table).effects_
    leading = {SMALL_REAL.head(int(i)) for row in effects for i in np.argsort(-row)[:3]}
    assert leading & set(engine.universal())
    order = rank_heads(specificity(effects, TASKS, {}).strongest, effects)
    assert not {SMALL_REAL.head(int(i)) for i in order[:, :3].ravel()} & set(engine.universal())
