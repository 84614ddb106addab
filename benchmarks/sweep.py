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

from cs_localize.asking import ask_items, load_tasks
from cs_localize.config import load_study
from cs_localize.findings import HeadsFile, read_file
from cs_localize.measure.progress import Progress
from cs_localize.recover import rank_heads, specificity
from cs_localize.session import open_session
from cs_localize.sweep import sweep
from processes import positive


def main() -> int:
    """Runs the sweep and prints it beside the study's finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--study", type=Path, default=Path("runs/demo"), help="folder of a finished study")
    parser.add_argument("--items", type=positive, help="search items a task (default: all of the study's)")
    arguments = parser.parse_args()
    study = arguments.study
    config = load_study(study / "study.yaml")
    found = read_file(study / "heads.json", HeadsFile)
    ledger = Path(config.ledger or study / "ledger")
    names = (*config.tasks, *config.controls)
    everything = load_tasks(names, config.lm_eval, config.model, config.engine, config.data)
    with open_session(config.model, config.engine, everything, ledger, Progress(None)) as session:
        shape = session.shape
        items = ask_items(config, everything, session.measurer).search
        damage = sweep(session.measurer, shape, {task: asked[: arguments.items] for task, asked in items.items()})
    relatives = {a: {b for b in config.tasks if b != a and everything[a].related(everything[b])} for a in config.tasks}

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
