"""Planted cases in which a refinement beats the plain Lasso: the reason that it exists."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cs_localize.design import draw_design, inclusion_rates
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover import Solver, make_solver
from tests.recover.builders import SMALL_REAL, measure_designs
from tests.recover.test_solvers import additive_table

TASKS = ("a", "b", "c", "d")


@cache
def planted(
    seed: int, requests: int, density: float = 0.06, spared: tuple[int, ...] = (0, 1, 2), **options: float
) -> tuple[PlantedEngine, MeasurementTable]:
    engine = PlantedEngine(SMALL_REAL, PlantedOptions(tasks=TASKS, seed=seed, **options))  # type: ignore[arg-type]
    rates = inclusion_rates(SMALL_REAL, density, spared)
    designs = {
        task: draw_design("balanced", "request", rates, requests, 60, 1, np.random.default_rng([seed, number]))
        for number, task in enumerate(TASKS)
    }
    return engine, measure_designs(engine, designs)


def truth(engine: PlantedEngine) -> NDArray[np.float64]:
    """Planted damage of the heads specific to each task, ``[n_tasks, n_heads]``; 0 elsewhere."""
    effects = np.zeros((len(TASKS), SMALL_REAL.n_heads))
    for row, task in enumerate(TASKS):
        for head, size in engine.truth(task).items():
            effects[row, SMALL_REAL.index(head)] = size
    return effects


def missed(solver: Solver, engine: PlantedEngine, table: MeasurementTable) -> float:
    """How far the effects of the specific heads are from the planted ones: mean absolute error in nats."""
    planted_effects = truth(engine)
    found = solver.fit(table).effects_
    return float(np.abs(found - planted_effects)[planted_effects > 0.5].mean())


def found_of_ten(solver: Solver, engine: PlantedEngine, table: MeasurementTable) -> float:
    """Share of the specific and universal heads among the ten strongest effects, mean over tasks."""
    effects = solver.fit(table).effects_
    universal = {SMALL_REAL.index(head) for head in engine.universal()}
    shares = []
    for row, task in enumerate(TASKS):
        wanted = universal | {SMALL_REAL.index(head) for head in engine.truth(task)}
        shares.append(len(wanted & set(np.argsort(-effects[row])[: len(wanted)].tolist())) / len(wanted))
    return float(np.mean(shares))


def test_a_saturating_link_beats_the_lasso_where_dense_masks_break_the_model() -> None:
    worlds = [planted(seed, 600, density=0.12, spared=(), variation=0.3, floor=5.0) for seed in range(4)]
    plain = [missed(make_solver("lasso"), *world) for world in worlds]
    linked = [missed(make_solver("saturating"), *world) for world in worlds]
    assert all(a < b for a, b in zip(linked, plain, strict=True)), (plain, linked)


def test_the_shared_part_beats_the_lasso_at_finding_all_heads_that_matter() -> None:
    worlds = [planted(seed, 600) for seed in range(4)]
    plain = np.mean([found_of_ten(make_solver("lasso"), *world) for world in worlds])
    joint = np.mean([found_of_ten(make_solver("cvxpy"), *world) for world in worlds])
    assert joint > plain


def test_a_group_penalty_beats_the_lasso_at_finding_a_kv_group_whose_heads_act_together() -> None:
    places: dict[str, list[int]] = {"lasso": [], "cvxpy": []}
    for seed in range(3):
        engine, table = planted(seed, 900)
        group = [SMALL_REAL.index(head) for head in engine.group()]
        for name, solver in (("lasso", make_solver("lasso")), ("cvxpy", make_solver("cvxpy", group=0.6))):
            effects = solver.fit(table).effects_[0]
            places[name].append(int(np.argsort(np.argsort(-effects))[group].max()))
    assert np.mean(places["cvxpy"]) < 0.6 * np.mean(places["lasso"]), places


def test_omp_beats_the_lasso_at_the_size_of_effects() -> None:
    worlds = [planted(seed, 1200) for seed in range(4)]
    plain = np.mean([missed(make_solver("lasso"), *world) for world in worlds])
    pursued = np.mean([missed(make_solver("omp"), *world) for world in worlds])
    assert pursued < plain, "the Lasso shrinks, a refit does not"


def test_item_effects_beat_a_lasso_that_takes_every_row_for_an_item_of_its_own() -> None:
    table = additive_table(noise=0.3)
    extra = 3.0 * np.random.default_rng(2).random(40)[table.item]
    shifted = replace(table, score=table.score - extra)
    blind = replace(shifted, item=np.arange(len(table)))
    ideal = make_solver("lasso", floor=100.0).fit(table).effects_
    with_items, without = (np.abs(make_solver("lasso", floor=100.0).fit(t).effects_ - ideal) for t in (shifted, blind))
    assert with_items.max() < 0.5 * without.max()
