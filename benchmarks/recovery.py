"""Which method finds planted heads for how many requests, and how long the solvers take.

    python benchmarks/recovery.py [--repeats 40] [--heads 270 512 1024] [--named 5 10] [--solvers lasso] [--out DIR]
                                  [--greedy]
    python benchmarks/recovery.py --speed [--large]

The generator is the `planted` engine, called in process. Four tasks, `a` to `d`, control each other; each has 40
search and 40 fresh items. N = 270 is 30 layers x 9 heads on 3 KV heads; 512 is 16 x 32 on 8; 1,024 is 32 x 32 on 8.
For task t, item i and knocked-out heads S,

    score = min(0, log(e^-10 + (1 - e^-10) exp(min(0, base_i - D))) + noise)
    D     = sum_h in S  effect[t,h] f[i,h] s_i  +  joint terms

with base_i = -exp(Normal(-1.2, 0.9)), s_i = exp(Normal(0, 0.3)), f[i,h] lognormal of mean 1 and log-deviation 0.8,
and noise Normal(0, 0.03). effect[t,h] is Laplace around 0.005 of scale 0.01 (a quiet background of about one percent
of the probability), plus: for each of k heads specific to the task 3 x 0.8^j, j = 0..k-1; for five universal heads in
the first tenth of the layers 3 x 0.8^(j/2) times exp(Normal(0, 0.2)). Joint terms, in units of 3 s_i: 0.5 if both the
first specific head and its backup are gone; for task `a`, the square of the share of one KV group that is gone. Which
heads, and every draw, follow from the seed of the repeat.

All methods rank by specificity. Requests are masked ones a task; the unablated items cost all methods the same. The
sparse methods see one design a repeat (balanced, 6% of heads in every mask, 1.5% in the first tenth of the layers),
cut to the budget. `2 rounds` and `3 rounds` are the Lasso on a part of it, or another solver by name, after which the
heads that lead are knocked out alone. Thompson sampling is run anew for every budget. Attribution patching needs
gradients, which the generator has not. `oracle` is told which heads are planted and orders them by least squares on
the same requests; it stands for the ceiling of recall and damage, and orders heads no better than least squares.
`hit`: the strongest specific head comes first. `recall`: share of the k specific heads among the first k. `damage`:
mean damage on fresh items with the first k heads zeroed together, less the mean over the other tasks, as a share of
the same for the k planted heads.
"""

from __future__ import annotations

import argparse
import csv
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cs_localize.design import Design, draw_design, inclusion_rates
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.measure.protocol import Mode, Request
from cs_localize.methods import (
    ExhaustiveSweep,
    Greedy,
    Method,
    RandomHeads,
    Rounds,
    ThinSweep,
    Thompson,
    by_specificity,
    divide,
    measure_baseline,
)
from cs_localize.outcomes import Item, MeasurementTable, Outcome
from cs_localize.recover import make_solver, selection_frequencies
from cs_localize.report.svg import Axes, element, label, picture
from processes import positive

TASKS = ("a", "b", "c", "d")
SHAPES = {
    270: ModelShape(layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536),
    512: ModelShape(layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192),
    1024: ModelShape(layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336),
    5120: ModelShape(layers=80, heads=64, kv_heads=8, head_dim=128, ffn=28672),
}
SEARCH = {task: [Item(task, f"search-{n}", f"{task} {n}:", f" {n}") for n in range(40)] for task in TASKS}
FRESH = {task: [Item(task, f"fresh-{n}", f"{task} {n}:", f" {n}") for n in range(40)] for task in TASKS}
SOLVERS: dict[str, tuple[str, dict[str, float]]] = {
    "lasso": ("lasso", {}),
    "cvxpy": ("cvxpy", {}),
    "cvxpy grouped": ("cvxpy", {"group": 0.5}),
    "omp": ("omp", {}),
    "saturating": ("saturating", {}),
    "ridge": ("ridge", {}),
    "marginal": ("marginal", {}),
}
BUDGETS = (1 / 3, 2 / 3, 1, 2, 4)
"""Requests a task, in multiples of the number of heads."""
_BEFORE_ROUNDS = ("lasso", "saturating")
_EVERY_SOLVER = 1024  # heads up to which all solvers are timed
_PANEL = (330, 230)
_MOST_NAMED = 50  # beyond, four tasks leave too few other heads of 270
COLUMNS = ("heads", "named", "requests", "method", "repeats", "hit", "recall", "damage")


class Direct:
    """A ``Measurer`` that asks the engine in this process."""

    def __init__(self, engine: PlantedEngine) -> None:
        self.engine = engine

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        """The item's number stands for its tokens."""
        kind, number = item.id.split("-")
        return Request(item, (len(kind), int(number)), (TASKS.index(item.task),), ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        """The engine's outcomes."""
        return self.engine.measure(requests)


def main() -> int:
    """Runs the comparison, or the clock."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=positive, default=40, help="seeds of the generator (default 40)")
    parser.add_argument("--heads", type=int, nargs="+", default=[270, 512, 1024], choices=[270, 512, 1024], metavar="N")
    parser.add_argument("--named", type=positive, nargs="+", default=[5, 10], metavar="K", help="planted heads a task")
    parser.add_argument(
        "--solvers", nargs="+", default=list(SOLVERS), choices=SOLVERS, metavar="NAME", help="only these"
    )
    parser.add_argument("--greedy", action="store_true", help="also iterative greedy, on 2 items: about 2 N K requests")
    parser.add_argument("--out", type=Path, help="folder for recovery.csv and recovery.svg")
    parser.add_argument("--speed", action="store_true", help="time the solvers instead")
    parser.add_argument("--large", action="store_true", help="with --speed: N = 5,120 with 15,000 requests as well")
    options = parser.parse_args()
    if max(options.named) > _MOST_NAMED:
        parser.error(f"--named is at most {_MOST_NAMED}")
    if options.large and not options.speed:
        parser.error("--large goes with --speed")
    if options.speed and (options.out or options.greedy):
        parser.error("--speed goes with --large alone")
    if options.speed:
        speed(options.large)
        return 0
    rows = []
    for heads in options.heads:
        for named in options.named:
            rows += compare(heads, named, options.repeats, options.greedy, options.solvers)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / "recovery.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerows([COLUMNS, *rows])
        (options.out / "recovery.svg").write_text(plot(rows), encoding="utf-8")
        print(f"{options.out / 'recovery.csv'} and {options.out / 'recovery.svg'} written")
    return 0


def compare(heads: int, named: int, repeats: int, greedy: bool, solvers: Sequence[str]) -> list[tuple[object, ...]]:
    """All methods on one size; prints the table and returns its rows."""
    marks: dict[tuple[int, str], list[NDArray[np.float64]]] = defaultdict(list)
    for seed in range(repeats):
        options = PlantedOptions(TASKS, seed, n_specific=named, decay=0.8, background=0.01)
        engine = PlantedEngine(SHAPES[heads], options)
        for requests, method, ranking in rankings(engine, seed, named, greedy, solvers):
            marks[requests, method].append(judge(engine, ranking, named))
    rows: list[tuple[object, ...]] = []
    print(f"\nN = {heads:,}, k = {named}, {repeats} repeats\n requests  method                hit  recall  damage")
    for (requests, method), scores in sorted(marks.items()):
        hit, recall, damage = np.mean(scores, axis=0)
        print(f"{requests:>9,}  {method:<20} {hit:.2f}    {recall:.2f}    {damage:.2f}", flush=True)
        rows.append((heads, named, requests, method, repeats, f"{hit:.4f}", f"{recall:.4f}", f"{damage:.4f}"))
    return rows


def rankings(
    engine: PlantedEngine, seed: int, named: int, greedy: bool, solvers: Sequence[str]
) -> Iterator[tuple[int, str, dict[str, tuple[Head, ...]]]]:
    """Requests a task, method and ranking, for every method at every budget."""
    measurer, shape = Direct(engine), engine.shape
    methods: dict[str, Method] = {"exhaustive": ExhaustiveSweep(), "random": RandomHeads(seed)}
    methods |= {f"thin sweep {items}": ThinSweep(items, seed) for items in (1, 2, 4)}
    if greedy:
        part = {task: items[:2] for task, items in SEARCH.items()}
        found = Greedy(named).localize(measurer, shape, part, {})
        yield found.requests["a"], "greedy", found.ranking
    for name, method in methods.items():
        found = method.localize(measurer, shape, SEARCH, {})
        yield found.requests["a"], name.rstrip(" 124"), found.ranking
    for budget in BUDGETS:
        found = Thompson(requests=int(budget * shape.n_heads), seed=seed).localize(measurer, shape, SEARCH, {})
        yield found.requests["a"], "thompson", found.ranking
    baseline = measure_baseline(measurer, SEARCH)
    largest = int(max(BUDGETS) * shape.n_heads)
    table = measured(engine, largest, seed)
    for budget in BUDGETS:
        requests = int(budget * shape.n_heads)
        part_table = first_of(table, requests)
        for name in solvers:
            solver, options = SOLVERS[name]
            effects = make_solver(solver, **options).fit(part_table).effects_
            yield requests, name, by_specificity(effects, shape, TASKS, {})
        yield requests, "oracle", by_specificity(oracle(engine, part_table), shape, TASKS, {})
        for rounds, name in product((2, 3), [name for name in _BEFORE_ROUNDS if name in ("lasso", *solvers)]):
            masks, *budgets = divide(requests, rounds)
            part_table = first_of(table, masks)
            fitted = make_solver(name).fit(part_table)
            after = Rounds(tuple(budgets), named, 0.95, float(fitted.get_params()["floor"]), seed)
            narrowed = after.narrow(measurer, SEARCH, {}, part_table, fitted.effects_, baseline)
            yield requests, f"{rounds} rounds" + (f", {name}" if name != "lasso" else ""), narrowed.ranking


def first_of(table: MeasurementTable, requests: int) -> MeasurementTable:
    """The first outcomes of every task."""
    return table.take(np.concatenate([table.rows_of(task)[:requests] for task in table.tasks]))


def measured(engine: PlantedEngine, requests: int, seed: int) -> MeasurementTable:
    """One design a task, measured."""
    shape = engine.shape
    rates = inclusion_rates(shape, 0.06, range(max(1, shape.layers // 10)), 0.015)
    designs = {}
    for number, task in enumerate(TASKS):
        rng = np.random.default_rng([seed, number])
        designs[task] = draw_design("balanced", "request", rates, requests, len(SEARCH[task]), 1, rng)
    return outcomes_of(engine, designs)


def outcomes_of(engine: PlantedEngine, designs: Mapping[str, Design]) -> MeasurementTable:
    """The outcomes of a design of every task, in the order of ``TASKS``."""
    heads, measurer = list(engine.shape.all_heads()), Direct(engine)
    columns = defaultdict(list)
    for number, task in enumerate(TASKS):
        design = designs[task]
        bare = measurer.measure([measurer.request(item, Ablation()) for item in SEARCH[task]], "baseline")
        ablations = [Ablation.of(heads[h] for h in np.flatnonzero(mask)) for mask in design.masks]
        asked = [measurer.request(SEARCH[task][i], a) for i, a in zip(design.items, ablations, strict=True)]
        outcomes = measurer.measure(asked, "search")
        columns["task"].append(np.full(len(design), number))
        columns["item"].append(design.items + number * len(SEARCH[task]))
        columns["masks"].append(design.masks)
        columns["score"].append(np.array([outcome.score for outcome in outcomes]))
        columns["baseline"].append(np.array([bare[i].score for i in design.items]))
        columns["correct"].append(np.array([outcome.correct for outcome in outcomes]))
        columns["tokens"].append(np.array([outcome.tokens for outcome in outcomes]))
    return MeasurementTable(engine.shape, TASKS, **{name: np.concatenate(parts) for name, parts in columns.items()})


def oracle(engine: PlantedEngine, table: MeasurementTable) -> NDArray[np.float64]:
    """Least squares on the planted heads alone, ``[n_tasks, n_heads]``."""
    shape = engine.shape
    planted = {*engine.universal(), *engine.group(), *map(engine.backup, TASKS)}.union(*map(engine.truth, TASKS))
    support = sorted(map(shape.index, planted))
    effects = np.zeros((len(TASKS), shape.n_heads))
    for row, task in enumerate(TASKS):
        rows = table.rows_of(task)
        columns = np.column_stack([table.masks[rows][:, support].astype(float), np.ones(len(rows))])
        effects[row, support] = np.linalg.lstsq(columns, table.damage(6.0)[rows], rcond=None)[0][:-1]
        # What matters to all tasks is specific to none, and told to the oracle.
        own = {shape.index(head) for head in engine.truth(task)}
        effects[row, [h for h in support if h not in own]] = 0.0
    return effects


def judge(engine: PlantedEngine, ranking: dict[str, tuple[Head, ...]], named: int) -> NDArray[np.float64]:
    """Hit, recall and damage of a ranking, means over tasks."""
    marks = []
    for task in TASKS:
        truth = list(engine.truth(task))
        first = ranking[task][:named]
        gained, best = (specific_damage(engine, task, heads) for heads in (first, truth))
        marks.append([first[0] == truth[0], len(set(first) & set(truth)) / named, gained / best])
    return np.asarray(np.mean(marks, axis=0))


def specific_damage(engine: PlantedEngine, task: str, heads: Sequence[Head]) -> float:
    """Damage to the task on fresh items, less the mean damage to the others, in nats."""
    controls = [fresh_damage(engine, other, heads) for other in TASKS if other != task]
    return fresh_damage(engine, task, heads) - float(np.mean(controls))


def fresh_damage(engine: PlantedEngine, task: str, heads: Sequence[Head]) -> float:
    """Mean damage on fresh items with some heads zeroed together, in nats."""
    measurer = Direct(engine)
    scores = [
        np.array([o.score for o in measurer.measure([measurer.request(item, a) for item in FRESH[task]], "judge")])
        for a in (Ablation(), Ablation.of(heads))
    ]
    return float(np.mean(scores[0] - scores[1]))


def plot(rows: Sequence[tuple[object, ...]]) -> str:
    """Hit, recall and damage against requests as SVG, a row a size; the same colour for a method everywhere."""
    methods = sorted({str(row[3]) for row in rows})
    sizes = sorted({(int(str(row[0])), int(str(row[1]))) for row in rows})
    axes = Axes(*_PANEL, place=lambda multiple: (np.log2(multiple) + 2) / 8)
    panels = []
    for (line, (heads, named)), (column, mark) in product(enumerate(sizes), enumerate(("hit", "recall", "damage"))):
        curves = defaultdict(list)
        for row in rows:
            if row[:2] == (heads, named) and int(str(row[2])):
                value = min(1.0, max(0.0, float(str(row[COLUMNS.index(mark)]))))
                curves[str(row[3])].append((int(str(row[2])) / heads, value, f"{row[3]}, {row[2]} requests: {value}"))
        drawn = [axes.curve(sorted(points), f"m{methods.index(name)}") for name, points in curves.items()]
        title = label(axes.width / 2, -2, f"{mark}, N = {heads:,}, k = {named}")
        content = title + axes.frame((1, 2, 4, 8, 16, 32), "requests a task / N") + "".join(drawn)
        place = f"translate({column * axes.width},{20 + line * (axes.height + 20)})"
        panels.append(element("g", content, transform=place))
    bottom = 40 + len(sizes) * (axes.height + 20)
    names = [
        element("text", name, x=46 + 160 * (number % 6), y=bottom + 18 * (number // 6), class_=f"m{number}")
        for number, name in enumerate(methods)
    ]
    colours = [f"hsl({360 * number // len(methods)},65%,40%)" for number in range(len(methods))]
    rules = [f".m{n}{{stroke:{c};fill:{c}}}text.m{n}{{stroke:none}}" for n, c in enumerate(colours)]
    style = element(
        "style", "text{font:12px sans-serif}.grid{stroke:#ddd}polyline{fill:none!important}" + "".join(rules)
    )
    height = bottom + 18 * (1 + len(methods) // 6)
    return picture(
        3 * axes.width,
        height,
        "hit, recall and damage of the planted heads against requests",
        style + "".join(panels + names),
        xmlns="http://www.w3.org/2000/svg",
    )


def speed(large: bool) -> None:
    """Prints the seconds and the memory of every solver, and how the seconds grow with the heads."""
    print("    heads  requests  what                   seconds  peak memory, GiB")
    taken: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for heads, requests in ((270, 900), (512, 1500), (1024, 3000), *([(5120, 15_000)] if large else [])):
        table = one_task(heads, requests)
        lasso = make_solver("lasso")
        calls: dict[str, Callable[[], object]] = {
            "lasso": partial(lasso.fit, table),
            "lasso, 100 resamples": partial(selection_frequencies, table, lasso, 100, np.random.default_rng(0)),
        }
        names = ("omp",) if heads > _EVERY_SOLVER else ("omp", "saturating", "cvxpy", "ridge", "marginal")
        calls |= {name: partial(make_solver(name).fit, table) for name in names}
        for what, call in calls.items():
            taken[what][heads] = clock(heads, requests, what, call)
    print("\nSeconds grow with the heads to the power of:")
    for what, seconds in taken.items():
        print(f"  {what:<22} {growth(seconds):.1f}")


def growth(seconds: Mapping[int, float]) -> float:
    """The exponent of a power law between the two largest numbers of heads, whose requests grow alike."""
    smaller, larger = sorted(seconds)[-2:]
    return float(np.log(seconds[larger] / seconds[smaller]) / np.log(larger / smaller))


def one_task(heads: int, requests: int) -> MeasurementTable:
    """Damage of 20 heads plus noise: the engine would take longer than the solvers."""
    rng = np.random.default_rng(0)
    shape = SHAPES[heads]
    design = draw_design("balanced", "request", inclusion_rates(shape, 0.06), requests, 60, 1, rng)
    effects = np.zeros(heads)
    effects[rng.choice(heads, 20, replace=False)] = 3 * 0.9 ** np.arange(20)
    damage = design.masks @ effects + rng.normal(0, 1, requests)
    zeros = np.zeros(requests)
    task = np.zeros(requests, dtype=np.int64)
    return MeasurementTable(shape, ("a",), task, design.items, design.masks, -damage, zeros, damage < 1, task)


def clock(heads: int, requests: int, what: str, call: Callable[[], object]) -> float:
    """Times one call, prints a row and returns the seconds. The memory is the most that the process has had so far."""
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{heads:>9,} {requests:>9,}  {what:<22} {seconds:>7.2f}  {peak:.2f}", flush=True)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
