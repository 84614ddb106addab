"""Which method finds the heads of a real model for how many requests: SmolLM2-135M-Instruct, the demo's six tasks.

    python benchmarks/recovery_real.py --ledger DIR [--seeds 0 1 2] [--held-out] [--greedy ITEMS]
                                       [--stepwise REQUESTS]

Outcomes are kept in the ledger, which is made if absent: the same command goes on where it was stopped, and seeds can
be run one at a time and then together. Without any, it measures some 165,000.

The truth is a sweep of every head over 48 search items of each task. A seed draws 32 of these items, the masks, and the
items of a thin sweep; the sparse methods see one design of 1,200 masks a task, cut to what their budget leaves for
masks. All rank by specificity against the strongest control. `first`: the truth's first head comes first. `tied`: that
head does, or one that the truth cannot tell from it: on resamples of the items it is ahead with a chance above 5%.
`of five`: how many of the first five are among the truth's. `same items`: the first head of a sweep of the very items
that the seed saw comes first, which leaves out what the choice of items does. `sweep of n items` is the sweep cut to n
random items of the same 48: what the truth says of itself, and so a ceiling and no competitor.

With `--held-out` the first five heads of each method are zeroed together on 40 held-out items of their task and on 8 of
each control, and so are those of the sweep. `own`: score the task loses, in nats an item; `specific`: less what its
controls lose, on average. The interval is a 95% bootstrap over the task's items, seeds averaged first.

With `--greedy ITEMS` iterative greedy, which sweeps every head again for each head that it adds, finds five heads on so
many search items, drawn once; `--held-out` zeroes these too. Nine items take 20 times 600 requests a task.
With `--stepwise REQUESTS` the method of that name finds five heads with so many requests a task, for every seed.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from recovery import first_of

from cs_localize.config import DesignConfig, load_study
from cs_localize.heads import Ablation, Head
from cs_localize.measure.measurer import LedgerMeasurer
from cs_localize.measure.progress import Progress
from cs_localize.methods import Greedy, Rounds, Sparse, Stepwise, ThinSweep, by_specificity, divide, measure_baseline
from cs_localize.outcomes import Item
from cs_localize.recover import specificity
from cs_localize.seeds import stream
from cs_localize.session import Session, open_session
from cs_localize.sweep import sweep
from cs_localize.tasks import get_task, relatives_of
from processes import positive

SEEDS = (100, 101, *range(10))
BUDGETS = (300, 600, 1200)
SEARCH_ITEMS, HELD_OUT_ITEMS, SEEN_ITEMS, CONTROL_ITEMS = 48, 40, 32, 8
FIRST, FLOOR = 5, 6.0
Ranking = Mapping[str, Sequence[Head]]
Items = Mapping[str, Sequence[Item]]


class Found(NamedTuple):
    """What a method found.

    Attributes:
        ranking: heads by task, first the most specific.
        seen: the same by the sweep of the items that the method was given.
    """

    ranking: Ranking
    seen: Ranking

    def same(self) -> float:
        """Share of tasks with the same first head in both."""
        return float(np.mean([heads[0] == self.seen[task][0] for task, heads in self.ranking.items()]))


class Truth:
    """The sweep, and what it says of rankings.

    Args:
        session: the model.
        items: search items by task.
        relatives: by task, the tasks that do not control it.
    """

    def __init__(self, session: Session, items: Items, relatives: Mapping[str, frozenset[str]]) -> None:
        self.shape, self.tasks, self.relatives = session.shape, tuple(items), relatives
        self.damage = sweep(session.measurer, session.shape, items, FLOOR)
        self.ranking = self.ranked({task: np.arange(SEARCH_ITEMS) for task in items})
        self._tied = self._ties()

    def ranked(self, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, tuple[Head, ...]]:
        """The ranking of a sweep of some items, by task."""
        effects = np.stack([self.damage[task][rows[task]].mean(axis=0) for task in self.tasks])
        return by_specificity(effects, self.shape, self.tasks, self.relatives)

    def marks(self, ranking: Ranking) -> list[float]:
        """First, tied and of five: means over tasks."""
        marks = []
        for task in self.tasks:
            found, true = ranking[task], self.ranking[task]
            marks.append([found[0] == true[0], found[0] in self._tied[task], len({*found[:FIRST]} & {*true[:FIRST]})])
        return list(np.mean(marks, axis=0))

    def halves(self) -> dict[str, int]:
        """By task, how many of the first five two halves of the items share."""
        even, odd = (self.ranked({t: np.arange(start, SEARCH_ITEMS, 2) for t in self.tasks}) for start in (0, 1))
        return {task: len({*even[task][:FIRST]} & {*odd[task][:FIRST]}) for task in self.tasks}

    def sampled(self, count: int, rng: np.random.Generator) -> dict[str, tuple[Head, ...]]:
        """The ranking of a sweep of so many random items."""
        return self.ranked({task: rng.choice(SEARCH_ITEMS, count, replace=False) for task in self.tasks})

    def _ties(self, resamples: int = 200) -> dict[str, set[Head]]:
        rng, beaten = stream(0, "ties"), defaultdict[str, list[NDArray[np.bool_]]](list)
        for _ in range(resamples):
            rows = [rng.choice(SEARCH_ITEMS, SEARCH_ITEMS) for _ in self.tasks]
            effects = np.stack([self.damage[t][r].mean(axis=0) for t, r in zip(self.tasks, rows, strict=True)])
            scores = specificity(effects, self.tasks, self.relatives).strongest
            for task, score in zip(self.tasks, scores, strict=True):
                beaten[task].append(score >= score[self.shape.index(self.ranking[task][0])])
        return {
            task: {self.shape.head(int(h)) for h in np.flatnonzero(np.mean(beaten[task], axis=0) > 0.05)}
            for task in self.tasks
        }


def main() -> int:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ledger", type=Path, required=True, help="folder of outcomes; made if absent")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(SEEDS), help="of masks and items (default: twelve)"
    )
    parser.add_argument("--held-out", action="store_true", help="also zero what was found, on held-out items")
    parser.add_argument("--greedy", type=int, metavar="ITEMS", help="also iterative greedy, on so many items")
    parser.add_argument("--stepwise", type=positive, metavar="REQUESTS", help="also stepwise, with so many requests")
    options = parser.parse_args()
    if options.greedy is not None and not 1 <= options.greedy <= SEARCH_ITEMS:
        parser.error(f"--greedy takes 1 to {SEARCH_ITEMS} items")
    config = load_study(Path(str(files("cs_localize") / "demo.yaml")))
    tasks = {task: get_task(task) for task in config.tasks}
    relatives = relatives_of(tasks)
    splits = {name: task.split(0, SEARCH_ITEMS, HELD_OUT_ITEMS) for name, task in tasks.items()}
    with open_session(config.model, config.engine, tasks, options.ledger, Progress(None)) as session:
        truth = Truth(session, {task: split.search for task, split in splits.items()}, relatives)
        print_truth(truth)
        rankings: dict[tuple[int, str], list[Found]] = defaultdict(list)
        for seed in options.seeds:
            rows = drawn(truth.tasks, SEEN_ITEMS, seed)
            seen = {task: [splits[task].search[i] for i in rows[task]] for task in rows}
            for requests, method, ranking in found_by(session, seen, relatives, seed, config.design):
                rankings[requests, method].append(Found(ranking, truth.ranked(rows)))
            if options.stepwise:
                stepwise = Stepwise(options.stepwise, FIRST, FLOOR, seed)
                ranking = stepwise.localize(session.measurer, session.shape, seen, relatives).ranking
                rankings[options.stepwise, "stepwise"].append(Found(ranking, truth.ranked(rows)))
        if options.greedy:
            rows = drawn(truth.tasks, options.greedy, 0)
            seen = {task: [splits[task].search[i] for i in rows[task]] for task in rows}
            greedy = Greedy(FIRST, FLOOR).localize(session.measurer, session.shape, seen, relatives)
            rankings[max(greedy.requests.values()), "greedy"].append(Found(greedy.ranking, truth.ranked(rows)))
        print_marks(truth, rankings, len(options.seeds))
        if options.held_out:
            held_out = {task: split.held_out for task, split in splits.items()}
            print_held_out(session.measurer, truth, rankings, held_out)
        asked = session.measurer.counts.values()
        print(
            f"{sum(count.served for count in asked):,} outcomes were in the ledger, "
            f"{sum(count.measured for count in asked):,} were measured"
        )
    return 0


def drawn(tasks: Sequence[str], count: int, seed: int) -> dict[str, NDArray[np.int64]]:
    """Some of the search items of every task, by their numbers."""
    return {task: np.sort(stream(seed, "items", task).choice(SEARCH_ITEMS, count, replace=False)) for task in tasks}


def found_by(
    session: Session, items: Items, relatives: Mapping[str, frozenset[str]], seed: int, design: DesignConfig
) -> list[tuple[int, str, Ranking]]:
    """Requests a task, method and ranking of every method at every budget."""
    measurer, shape = session.measurer, session.shape
    results: list[tuple[int, str, Ranking]] = []
    for count in (1, 2, 4):
        thin = ThinSweep(count, seed, FLOOR).localize(measurer, shape, items, relatives)
        results.append((max(thin.requests.values()), "thin sweep", thin.ranking))
    whole = Sparse(design.model_copy(update={"requests": max(BUDGETS)}), seed=seed)
    sparse = whole.localize(measurer, shape, items, relatives).sparse
    assert sparse is not None
    baseline = measure_baseline(measurer, items)
    for requests in BUDGETS:
        for rounds in (1, 2, 3):
            masks, *budgets = divide(requests, rounds)
            table = first_of(sparse.table, masks)
            effects = sparse.solver.fit(table).effects_
            if not budgets:
                results.append((requests, "masks alone", by_specificity(effects, shape, table.tasks, relatives)))
                continue
            after = Rounds(tuple(budgets), FIRST, design.confidence, FLOOR, seed)
            narrowed = after.narrow(measurer, items, relatives, table, effects, baseline)
            results.append((requests, f"{rounds} rounds", narrowed.ranking))
    return results


def print_truth(truth: Truth) -> None:
    """What the sweep finds, and how far it agrees with itself."""
    halves = truth.halves()
    print(f"sweep of {truth.shape.n_heads * SEARCH_ITEMS:,} requests a task")
    for task in truth.tasks:
        first = " ".join(map(str, truth.ranking[task][:FIRST]))
        print(f"  {task:<12} {first:<36} halves of the items share {halves[task]} of {FIRST}")


def print_marks(truth: Truth, rankings: Mapping[tuple[int, str], Sequence[Found]], seeds: int) -> None:
    """First, tied, of five and same items for every method."""
    print(f"\n{seeds} seeds\n requests  method               first  tied  of five  same items")
    for (requests, method), found in sorted(rankings.items()):
        first, tied, five = np.mean([truth.marks(each.ranking) for each in found], axis=0)
        same = np.mean([each.same() for each in found])
        print(f"{requests:>9,}  {method:<20} {first:.2f}   {tied:.2f}  {five:.1f}      {same:.2f}")
    rng = stream(0, "ceiling")
    for count in (8, 24, 32):
        first, tied, five = np.mean([truth.marks(truth.sampled(count, rng)) for _ in range(50)], axis=0)
        requests, method = count * truth.shape.n_heads, f"sweep of {count} items"
        print(f"{requests:>9,}  {method:<20} {first:.2f}   {tied:.2f}  {five:.1f}", flush=True)


def print_held_out(
    measurer: LedgerMeasurer, truth: Truth, rankings: Mapping[tuple[int, str], Sequence[Found]], items: Items
) -> None:
    """Damage of the first heads of every method on held-out items, beside that of the sweep's."""
    sweep_requests = truth.shape.n_heads * SEARCH_ITEMS
    compared: dict[tuple[int, str], Sequence[Ranking]] = {(sweep_requests, "sweep"): [truth.ranking]}
    compared |= {key: [each.ranking for each in found] for key, found in rankings.items() if key[1] != "2 rounds"}
    damage = held_out_damage(measurer, truth, compared, items)
    best = damage[sweep_requests, "sweep"]
    rng = stream(0, "held-out")
    draws = rng.integers(HELD_OUT_ITEMS, size=(1000, HELD_OUT_ITEMS))
    print(f"\nfirst {FIRST} heads zeroed together on held-out items")
    print(" requests  method         own  specific  less the sweep's")
    for key, (own, controls) in sorted(damage.items()):
        lead = (own - best[0])[:, draws].mean(axis=(0, 2)) - float((controls - best[1]).mean())
        low, high = np.quantile(lead, [0.025, 0.975])
        specific = own.mean() - controls.mean()
        beside = f"{lead.mean():+.2f} [{low:+.2f}, {high:+.2f}]"
        print(f"{key[0]:>9,}  {key[1]:<13} {own.mean():.2f}    {specific:.2f}     {beside}")


def held_out_damage(
    measurer: LedgerMeasurer,
    truth: Truth,
    compared: Mapping[tuple[int, str], Sequence[Ranking]],
    items: Items,
) -> dict[tuple[int, str], tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """By requests and method, ``[tasks, items]`` damage to the task and ``[tasks]`` mean damage to its controls."""
    bare = {t: np.array([o.score for o in found]) for t, found in measure_baseline(measurer, items).items()}
    asked: dict[tuple[str, Ablation, str], None] = {}
    for found in compared.values():
        for ranking in found:
            for task in truth.tasks:
                ablation = Ablation.of(ranking[task][:FIRST])
                asked.update(dict.fromkeys((task, ablation, other) for other in [task, *_controls(truth, task)]))
    lengths = {key: HELD_OUT_ITEMS if key[0] == key[2] else CONTROL_ITEMS for key in asked}
    requests = [measurer.request(item, a) for (t, a, o), n in lengths.items() for item in items[o][:n]]
    scores = iter(measurer.measure(requests, "held-out"))
    lost = {
        key: np.array([min(before - next(scores).score, FLOOR) for before in bare[key[2]][:n]])
        for key, n in lengths.items()
    }
    result = {}
    for key, found in compared.items():
        own, controls = [], []
        for task in truth.tasks:
            sets = [Ablation.of(ranking[task][:FIRST]) for ranking in found]
            own.append(np.mean([lost[task, zeroed, task] for zeroed in sets], axis=0))
            others = _controls(truth, task)
            controls.append(np.mean([lost[task, zeroed, other].mean() for zeroed in sets for other in others]))
        result[key] = (np.stack(own), np.array(controls))
    return result


def _controls(truth: Truth, task: str) -> list[str]:
    return [other for other in truth.tasks if other != task and other not in truth.relatives[task]]


if __name__ == "__main__":
    sys.exit(main())
