"""What a model can do before anything is taken from it: the baselines of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cs_localize.asking import fitting, load_tasks, warn_left_out
from cs_localize.config import DataConfig, EngineConfig, LmEvalConfig
from cs_localize.confirm.stats import wilson
from cs_localize.errors import UsageError
from cs_localize.findings import Interval
from cs_localize.heads import Ablation
from cs_localize.measure.progress import Progress
from cs_localize.outcomes import Item
from cs_localize.results import check_logging, log_answers, make_samples_folder
from cs_localize.seeds import stream
from cs_localize.session import open_session
from cs_localize.tasks import Capability, Task


@dataclass(frozen=True)
class Baseline:
    """What the unmodified model does on one task.

    Attributes:
        task: the task.
        items: items asked.
        of: items the task has.
        accuracy: share answered right, by the task's own metric on generated text.
        ci: its 95% Wilson interval.
        score: mean log-probability of the reference answers, in nats an item.
    """

    task: str
    items: int
    of: int
    accuracy: float
    ci: Interval
    score: float


def baselines(
    model: str,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    seed: int = 0,
    engine: EngineConfig | None = None,
    ledger: Path,
    data: Mapping[str, DataConfig] | None = None,
    lm_eval: LmEvalConfig | None = None,
    samples: Path | None = None,
) -> list[Baseline]:
    """Asks a model every item of some tasks twice: to answer it, and for the log-probability of the reference answer.

    Items that do not fit the model are left out, with a warning.

    Args:
        model: a directory, a hub id or a built-in model name.
        tasks: tasks to measure.
        limit: most items a task, drawn with the seed from all it has.
        seed: seed of that draw.
        engine: which engine, and how many; vLLM by default.
        ledger: folder of measured outcomes; what it holds is not measured again.
        data: where tasks of the user's own come from, by name.
        lm_eval: how tasks of lm-evaluation-harness are asked and graded.
        samples: folder that gets results and every answer as lm-eval writes them.

    Raises:
        CsLocalizeError: if anything asked for cannot be had.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit}: ask for at least 1 item")
    if seed < 0:
        raise UsageError(f"--seed {seed}: at least 0 is needed")
    engine = engine or EngineConfig()
    known = load_tasks(tasks, lm_eval or LmEvalConfig(), model, engine, data)
    if samples is not None:
        check_logging(known)
        make_samples_folder(samples)
    every = {name: _items(task, seed) for name, task in known.items()}
    drawn = {name: _drawn(name, asked, limit, seed) for name, asked in every.items()}
    with open_session(model, engine, known, ledger, Progress(None)) as session:
        items = fitting(drawn, session.measurer)
        requests = [
            session.measurer.request(item, Ablation(), mode)
            for asked in items.values()
            for item in asked
            for mode in ("generate", "score")
        ]
        outcomes = iter(session.measurer.measure(requests, "baselines"))
        if samples is not None:
            log_answers(samples, session.measurer, known, items, Ablation(), model, engine.name, "baselines")
    found = []
    for name, asked in items.items():
        pairs = [(next(outcomes), next(outcomes)) for _ in asked]
        right = sum(answered.correct for answered, _ in pairs)
        found.append(
            Baseline(
                task=name,
                items=len(asked),
                of=len(every[name]),
                accuracy=right / len(asked),
                ci=wilson(right, len(asked)),
                score=float(np.mean([scored.score for _, scored in pairs])),
            )
        )
    return found


def baselines_table(found: Sequence[Baseline]) -> list[str]:
    """The baselines as lines of text, for a terminal."""
    lines = [f"{'task':<20} {'items':>10} {'accuracy':>9}   {'95% interval':<17} {'score':>7}"]
    for b in found:
        interval = f"{b.ci[0]:.1%} to {b.ci[1]:.1%}"
        lines.append(f"{b.task:<20} {f'{b.items}/{b.of}':>10} {b.accuracy:>9.1%}   {interval:<17} {b.score:>7.2f}")
    return lines


def _items(task: Capability, seed: int) -> list[Item]:
    """All items of a task, in the order of its questions where it has such."""
    if isinstance(task, Task):
        return [task.item(question) for question in task.questions]
    split = task.split(seed)
    warn_left_out(task.name, split.left_out)
    return [*split.search, *split.held_out]


def _drawn(task: str, items: list[Item], limit: int | None, seed: int) -> list[Item]:
    """All of them, or a part drawn at random."""
    if limit is None or limit >= len(items):
        return items
    chosen = stream(seed, "baseline", task).choice(len(items), size=limit, replace=False)
    return [items[number] for number in sorted(chosen)]
