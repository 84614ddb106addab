"""One ablation on some tasks: what a researcher asks when they have heads in mind already."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from cs_localize.config import EngineConfig
from cs_localize.confirm.stats import mcnemar_exact, paired_bootstrap, stream, wilson
from cs_localize.errors import UsageError
from cs_localize.findings import Interval, write_text
from cs_localize.heads import Ablation
from cs_localize.measure.progress import Progress
from cs_localize.session import open_session
from cs_localize.tasks import get_task

_RESAMPLES = 2000


@dataclass(frozen=True)
class AblationEffect:
    """What an ablation does to one task.

    Attributes:
        task: the task.
        items: items asked.
        baseline: accuracy of the unmodified model.
        accuracy: accuracy under the ablation.
        drop: baseline minus accuracy, with its 95% paired bootstrap interval.
        ci: that interval.
        accuracy_ci: 95% Wilson interval of the accuracy.
        p: exact McNemar p-value.
    """

    task: str
    items: int
    baseline: float
    accuracy: float
    drop: float
    ci: Interval
    accuracy_ci: Interval
    p: float


def ablate(
    model: str,
    ablation: Ablation,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    seed: int = 0,
    engine: EngineConfig | None = None,
    ledger: Path,
    samples: Path | None = None,
) -> list[AblationEffect]:
    """Generates answers with and without an ablation and grades them with each task's own metric.

    Args:
        model: a directory, a hub id or a built-in model name.
        ablation: what is changed.
        tasks: tasks to measure.
        limit: most items a task; they are the held-out items of a study with this seed.
        seed: seed of the split.
        engine: which engine, and how many; vLLM by default.
        ledger: folder of measured outcomes; what it holds is not measured again.
        samples: file that gets every answer as one JSON object a line.

    Raises:
        CsLocalizeError: if anything asked for cannot be had.
    """
    if not tasks:
        raise UsageError("name at least one task; 'cs-localize tasks' lists them")
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit}: ask for at least 1 item")
    if seed < 0:
        raise UsageError(f"--seed {seed}: at least 0 is needed")
    if samples is not None:
        samples = _writable(samples)
    items = {name: get_task(name).split(seed).held_out[:limit] for name in dict.fromkeys(tasks)}
    progress = Progress(None)
    with open_session(model, engine or EngineConfig(), tuple(items), ledger, progress) as session:
        ablation.check(session.shape)
        requests = [
            session.measurer.request(item, change, "generate")
            for asked in items.values()
            for change in (Ablation(), ablation)
            for item in asked
        ]
        outcomes = session.measurer.measure(requests, "ablate")
    if samples is not None:
        rows = (
            {
                "task": request.item.task,
                "id": request.item.id,
                "ablation": request.ablation.encode(),
                "prompt": request.item.prompt,
                "target": request.item.answer,
                "response": outcome.text,
                "correct": outcome.correct,
            }
            for request, outcome in zip(requests, outcomes, strict=True)
        )
        write_text(samples, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    effects = []
    start = 0
    for name, asked in items.items():
        flags = [outcome.correct for outcome in outcomes[start : start + 2 * len(asked)]]
        start += 2 * len(asked)
        effects.append(_effect(name, flags[: len(asked)], flags[len(asked) :], seed))
    return effects


def _writable(samples: Path) -> Path:
    """Where to write the samples; what is no file is refused, since the samples would take its place."""
    if samples.exists() and not samples.is_file():
        raise UsageError(f"--log-samples {samples}: there is something else than a file; name another")
    file = samples.resolve()
    if not file.parent.is_dir():
        raise UsageError(f"--log-samples {samples}: there is no folder {samples.parent}")
    if not os.access(file.parent, os.W_OK):
        raise UsageError(f"--log-samples {samples}: the folder {samples.parent} cannot be written")
    return file


def effects_json(effects: Sequence[AblationEffect]) -> str:
    """The effects as JSON, one object a task."""
    return json.dumps([asdict(effect) for effect in effects], indent=1)


def effects_table(effects: Sequence[AblationEffect]) -> list[str]:
    """The effects as lines of text, for a terminal."""
    lines = [f"{'task':<20} {'items':>5} {'baseline':>9} {'ablated':>9} {'drop':>7}   95% interval        p"]
    for e in effects:
        lines.append(
            f"{e.task:<20} {e.items:>5} {e.baseline:>9.1%} {e.accuracy:>9.1%} {100 * e.drop:>7.1f}"
            f"   {100 * e.ci[0]:>6.1f} to {100 * e.ci[1]:>5.1f}   {e.p:.2g}"
        )
    return lines


def _effect(task: str, before: list[bool], after: list[bool], seed: int) -> AblationEffect:
    first, second = np.array(before), np.array(after)
    return AblationEffect(
        task=task,
        items=len(before),
        baseline=float(first.mean()),
        accuracy=float(second.mean()),
        drop=float(first.mean() - second.mean()),
        ci=paired_bootstrap(first, second, _RESAMPLES, stream(seed, "ablate", task)),
        accuracy_ci=wilson(int(second.sum()), len(second)),
        p=mcnemar_exact(int((first & ~second).sum()), int((~first & second).sum())),
    )
