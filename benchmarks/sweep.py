"""The exhaustive sweep: every head alone, on every search item of every task. The truth that a study is held against.

    python benchmarks/sweep.py --study runs/demo

It reads the study's settings from its folder and keeps outcomes in the study's ledger, so it can be stopped and
continued. It prints, for each task, the heads by specificity, how far two halves of the items agree, and where the
study's ranking puts the sweep's first head.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cs_localize.config import StudyConfig, load_study
from cs_localize.findings import HeadsFile, read_file
from cs_localize.heads import Ablation
from cs_localize.measure.progress import Progress
from cs_localize.recover import rank_heads, specificity
from cs_localize.session import Session, open_session
from cs_localize.tasks import get_task

FLOOR = 8.0  # nats; as in MeasurementTable.damage


def sweep(session: Session, config: StudyConfig) -> dict[str, NDArray[np.float64]]:
    """Damage of every head on every search item: by task ``[items, n_heads]`` in nats."""
    heads = list(session.shape.all_heads())
    items = {task: get_task(task).split(config.seed, config.search_items).search for task in config.tasks}
    ask = session.measurer.request
    baseline = [ask(item, Ablation()) for task in items for item in items[task]]
    # Head by head, so that requests under the same ablation share their few-shot prefix in the cache.
    swept = [ask(item, Ablation.of([head])) for head in heads for task in items for item in items[task]]
    before = np.array([outcome.score for outcome in session.measurer.measure(baseline, "baseline")])
    after = np.array([outcome.score for outcome in session.measurer.measure(swept, "sweep")])
    damage = np.minimum(before[None, :] - after.reshape(len(heads), -1), FLOOR)
    ends = np.cumsum([len(items[task]) for task in items])
    return {task: part.T for task, part in zip(items, np.split(damage, ends[:-1], axis=1), strict=True)}


def main() -> int:
    """Runs the sweep and prints it beside the study's finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--study", type=Path, default=Path("runs/demo"), help="folder of a finished study")
    study = parser.parse_args().study
    config = load_study(study / "study.yaml")
    found = read_file(study / "heads.json", HeadsFile)
    ledger = Path(config.ledger or study / "ledger")
    everything = (*config.tasks, *config.controls)
    with open_session(config.model, config.engine, everything, ledger, Progress(None)) as session:
        damage = sweep(session, config)
        shape = session.shape
    relatives = {a: {b for b in config.tasks if b != a and get_task(a).related(get_task(b))} for a in config.tasks}

    def ranked(rows: dict[str, NDArray[np.float64]]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        effects = np.stack([part.mean(axis=0) for part in rows.values()])
        strongest = specificity(effects, tuple(rows), relatives).strongest
        return strongest, rank_heads(strongest, effects)

    strongest, order = ranked(damage)
    _, even = ranked({task: part[::2] for task, part in damage.items()})
    _, odd = ranked({task: part[1::2] for task, part in damage.items()})
    for number, task in enumerate(config.tasks):
        top = [shape.head(int(i)) for i in order[number, :5]]
        agree = len(set(even[number, :5]) & set(odd[number, :5]))
        place = [head.head for head in found.tasks[task].ranking].index(str(top[0])) + 1
        shown = " ".join(f"{head}:{strongest[number, shape.index(head)]:.1f}" for head in top)
        requests = damage[task].size
        print(
            f"{task:<12} sweep of {requests:,} requests: {shown}   halves share {agree} of 5   "
            f"the study ({found.tasks[task].requests:,} requests) ranks {top[0]} number {place}; "
            f"names {' '.join(found.tasks[task].named)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
