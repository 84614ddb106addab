"""How often selected heads are false, and how many of the planted ones are found, against the rate that was asked for.

    python benchmarks/error_control.py [--repeats 200] [--requests 400] [--named 5] [--items 12] [--out FILE]

The generator is the `planted` engine of `benchmarks/recovery.py` without its quiet background, so that a head outside
the planted ones has no effect at all. N = 270 heads (30 x 9), four tasks with 40 search items each. Task `a` has no
heads of its own; `b`, `c` and `d` have `--named` each, 3 x 0.8^j nats. Five universal heads of the first layers hurt
all four tasks alike: they have an effect on each, and none of them is specific. Masks are Bernoulli ones, 6% of heads
and 1.5% in the first layers. Every repeat plants other heads.

`false`: what the method promises to bound, over all heads and tasks of a repeat. `share`: false heads among those
selected (0 if none is). `any`: whether there is one. `number`: how many a task. What is false differs by the promise:

- BH and Holm on tests of single heads, the first ten of each ranking, alone on `--items` items and as many of the
  controls: every head but those planted for the task. Universal heads are false, and lie on the border of the null.
- Knockoffs: heads without an effect on the task, alone or beside others. Universal heads and the task's backup are not
  false. `unspecific`, the share of heads selected that were not planted for the task, has them in it.
- Stability selection: the same; `asked` is the bound on the expected number a task, at 30 resamples of ten heads.
- `first k`: the k most specific heads of every task, without any control. Those not planted for the task are false.

`found`: share of the planted heads that is selected. Standard errors over repeats follow a figure.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from recovery import SEARCH, SHAPES, TASKS, outcomes_of

from cs_localize.config import SingleHeadConfig
from cs_localize.design import draw_design, inclusion_rates
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.outcomes import MeasurementTable
from cs_localize.recover import (
    LassoSolver,
    expected_null_selections,
    heads_in_order,
    knockoff_selection,
    rank_heads,
    selection_frequencies,
    single_head_tests,
    specificity,
)
from cs_localize.selection import single_head_requests
from processes import positive

SHAPE = SHAPES[270]
CANDIDATES = 10
RESAMPLES = 30
COLUMNS = ("method", "asked", "bounds", "false", "false_se", "unspecific", "found", "found_se", "selected", "repeats")

Mask = NDArray[np.bool_]
Key = tuple[str, float | None, str]
"""Method, what it was asked to bound that by, and what it bounds."""


@dataclass(frozen=True)
class Truth:
    """What was planted, each ``[n_tasks, n_heads]``.

    Attributes:
        specific: the task's own heads.
        effect: heads with any effect on the task.
    """

    specific: Mask
    effect: Mask


def main() -> int:
    """Runs the comparison and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=positive, default=200, help="seeds of the generator (default 200)")
    parser.add_argument("--requests", type=positive, default=400, help="masked requests a task (default 400)")
    parser.add_argument("--named", type=positive, default=5, help="planted heads of three of the tasks (default 5)")
    parser.add_argument("--items", type=positive, default=12, help="items of each test (default 12)")
    parser.add_argument("--out", type=Path, help="CSV file for the table")
    options = parser.parse_args()
    if not 2 <= options.items <= len(SEARCH["a"]) or options.named > 40:
        parser.error(f"--items is 2 to {len(SEARCH['a'])}, and --named at most 40")
    marks: dict[Key, list[tuple[float, float, float, int]]] = defaultdict(list)
    for seed in range(options.repeats):
        planted = PlantedOptions(
            TASKS, seed, options.named, decay=0.8, background=0.0, universal_spread=0.0, without=("a",)
        )
        engine = PlantedEngine(SHAPE, planted)
        truth = planted_truth(engine)
        for key, selected in selections(engine, options.requests, options.items, options.named, seed):
            marks[key].append(judge(key, selected, truth))
    rows = [row(key, np.array(scores)) for key, scores in marks.items()]
    print("method      asked bounds   false +- error  unspecific   found +- error  selected")
    for method, asked, bounds, false, false_error, unspecific, found, found_error, number, _ in rows:
        print(
            f"{method:<11} {asked:<5} {bounds:<6}  {false} +- {false_error}       {unspecific}  {found} +- "
            f"{found_error}     {number:>5}"
        )
    if options.out:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
    return 0


def planted_truth(engine: PlantedEngine) -> Truth:
    """The answer key of an engine without a group and without a background."""
    specific = np.zeros((len(TASKS), SHAPE.n_heads), dtype=bool)
    for number, task in enumerate(TASKS):
        specific[number, list(map(SHAPE.index, engine.truth(task)))] = True
    effect = specific.copy()
    effect[:, list(map(SHAPE.index, engine.universal()))] = True
    for number, task in enumerate(TASKS):
        effect[number, SHAPE.index(engine.backup(task))] |= bool(engine.truth(task))
    return Truth(specific, effect)


def selections(engine: PlantedEngine, requests: int, items: int, named: int, seed: int) -> Iterator[tuple[Key, Mask]]:
    """What every method selects at every rate, ``[n_tasks, n_heads]``, on one measurement."""
    rng = np.random.default_rng(seed)
    rates = inclusion_rates(SHAPE, 0.06, range(SHAPE.layers // 10), 0.015)
    table = outcomes_of(
        engine,
        {task: draw_design("bernoulli", "request", rates, requests, len(SEARCH[task]), 1, rng) for task in TASKS},
    )
    effects = LassoSolver().fit(table).effects_
    order = rank_heads(specificity(effects, TASKS, {}).strongest, effects)

    p, positions = tested(engine, table, order, items, rng)
    for method, correction in (("BH", "bh"), ("Holm", "holm")):
        adjusted = p[correction]
        for level in (0.05, 0.1, 0.2):
            kept = np.zeros(effects.shape, dtype=bool)
            kept[positions[0][adjusted <= level], positions[1][adjusted <= level]] = True
            yield (method, level, "share" if method == "BH" else "any"), kept
    for level in (0.1, 0.2):
        yield ("knockoffs", level, "share"), knockoff_selection(table, rates, level, rng).selected
    frequency = selection_frequencies(table, LassoSolver(), RESAMPLES, rng)
    for least in (0.6, 0.75, 0.9):
        yield ("stability", round(expected_null_selections(least, SHAPE.n_heads), 2), "number"), frequency >= least
    first = np.zeros(effects.shape, dtype=bool)
    np.put_along_axis(first, order[:, :named], True, axis=1)
    yield ("first k", None, "share"), first


def tested(
    engine: PlantedEngine, table: MeasurementTable, order: NDArray[np.int64], items: int, rng: np.random.Generator
) -> tuple[dict[str, NDArray[np.float64]], tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Adjusted p-values of the candidates by correction, and the candidates as positions of tasks and heads."""
    candidates = heads_in_order(order[:, :CANDIDATES], SHAPE, TASKS)
    counts = {task: len(SEARCH[task]) for task in TASKS}
    asked = single_head_requests(SHAPE, candidates, counts, {}, SingleHeadConfig(items=items, control_items=items))
    alone = outcomes_of(engine, asked.designs)
    heads = {task: list(map(SHAPE.index, candidates[task])) for task in TASKS}
    tests = single_head_tests(alone, heads, {}, rng, rearrangements=1999)
    return {"bh": tests.adjusted("bh"), "holm": tests.adjusted("holm")}, (tests.task, tests.head)


def judge(key: Key, selected: Mask, truth: Truth) -> tuple[float, float, float, int]:
    """What is false by the method's own promise, the share that is not specific, the share found, and the number."""
    method, _, bounds = key
    true = truth.effect if method in ("knockoffs", "stability") else truth.specific
    number = int(selected.sum())
    false = int((selected & ~true).sum())
    figures = {"share": false / max(number, 1), "any": float(false > 0), "number": false / len(TASKS)}
    unspecific = int((selected & ~truth.specific).sum()) / max(number, 1)
    return figures[bounds], unspecific, float((selected & truth.specific).sum() / truth.specific.sum()), number


def row(key: Key, scores: NDArray[np.float64]) -> tuple[str, ...]:
    """Means and standard errors, as text."""
    means, errors = scores.mean(axis=0), scores.std(axis=0) / np.sqrt(len(scores))
    method, asked, bounds = key
    figures = (means[0], errors[0], means[1], means[2], errors[2])
    rate = "-" if asked is None else f"{asked:g}"
    return method, rate, bounds, *(f"{figure:.3f}" for figure in figures), f"{means[3]:.1f}", str(len(scores))


if __name__ == "__main__":
    sys.exit(main())
