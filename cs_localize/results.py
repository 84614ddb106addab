"""Answers as lm-evaluation-harness writes them: ``results_<date>.json`` and ``samples_<task>_<date>.jsonl``.

Field names and file names are those of lm-eval 0.4, whose own tools read them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cs_localize import __version__
from cs_localize.errors import UsageError
from cs_localize.findings import write_text
from cs_localize.heads import Ablation, Head
from cs_localize.measure.protocol import Measurer
from cs_localize.outcomes import Item, Outcome
from cs_localize.tasks import Capability, Record
from cs_localize.tasks.harness import HarnessTask

Answered = Mapping[str, Sequence[tuple[Item, Outcome]]]


def check_logging(tasks: Mapping[str, Capability]) -> None:
    """Refuses tasks whose samples would get into each other's file.

    Args:
        tasks: the tasks by name.

    Raises:
        UsageError: if two have questions of one task, as a group and a task of that group do.
    """
    owners: dict[str, str] = {}
    for name, task in tasks.items():
        for member in task.members if isinstance(task, HarnessTask) else (name,):
            other = owners.setdefault(member, name)
            if other != name:
                raise UsageError(
                    f"tasks '{other}' and '{name}' both have questions of '{member}', whose samples go into one file; "
                    "ask one of the two, or log no samples"
                )


def make_samples_folder(folder: Path) -> None:
    """Makes a folder for samples unless it is there, before anything is measured.

    Raises:
        UsageError: if it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; choose another folder") from None


def log_answers(
    folder: Path,
    measurer: Measurer,
    tasks: Mapping[str, Capability],
    items: Mapping[str, Sequence[Item]],
    ablation: Ablation,
    model: str,
    engine: str,
    stage: str = "samples",
) -> None:
    """Writes the answers to some items under an ablation; those that the ledger holds are not asked again.

    Args:
        folder: where to; made when missing. Files of the same kind that it holds are replaced.
        measurer: who answers.
        tasks: the tasks of the items by name.
        items: what is asked, by task.
        ablation: what is changed in the forward pass.
        model: the model as the user named it.
        engine: name of the engine.
        stage: a word for the progress display.

    Raises:
        MeasurementError: if an outcome cannot be measured.
        UsageError: if the folder cannot be written.
    """
    requests = [measurer.request(item, ablation, "generate") for asked in items.values() for item in asked]
    outcomes = iter(measurer.measure(requests, stage))
    answered = {name: [(item, next(outcomes)) for item in asked] for name, asked in items.items()}
    write_answers(folder, tasks, answered, ablation, model, engine, datetime.now())


def log_confirmation(
    folder: Path,
    measurer: Measurer,
    tasks: Mapping[str, Capability],
    held_out: Mapping[str, Sequence[Item]],
    named: Mapping[str, Sequence[Head]],
    universal: Sequence[Head],
    model: str,
    engine: str,
) -> None:
    """Writes all held-out answers of a study: unablated, without the heads of every task, and without universal ones.

    Args:
        folder: where to; it gets a folder for each of these.
        measurer: who answers; what the confirmation asked comes from the ledger.
        tasks: the tasks and controls by name.
        held_out: items of each.
        named: the named heads, by task.
        universal: the universal heads.
        model: the model as the user named it.
        engine: name of the engine.
    """
    without = {f"without-{task}": heads for task, heads in named.items()} | {"without-universal-heads": universal}
    changes = {name: Ablation.of(heads) for name, heads in without.items() if heads}
    for name, ablation in {"baseline": Ablation(), **changes}.items():
        log_answers(folder / name, measurer, tasks, held_out, ablation, model, engine)


def write_answers(
    folder: Path,
    tasks: Mapping[str, Capability],
    answered: Answered,
    ablation: Ablation,
    model: str,
    engine: str,
    when: datetime,
) -> None:
    """Writes one results file, and a samples file for every task or member of a group.

    Args:
        folder: where to; made when missing. Files of the same kind that it holds are replaced.
        tasks: the tasks by name.
        answered: by task, items with their graded outcomes.
        ablation: what was changed in the forward pass.
        model: the model as the user named it.
        engine: name of the engine.
        when: the date in the files and their names.

    Raises:
        UsageError: if the folder cannot be written.
    """
    date = when.replace(tzinfo=None).isoformat().replace(":", "-")
    records = {
        name: [(item, tasks[name].record(item, outcome)) for item, outcome in pairs] for name, pairs in answered.items()
    }
    samples: dict[str, list[dict[str, Any]]] = {}
    for pairs in records.values():
        for item, record in pairs:
            samples.setdefault(record.task, []).append(_sample(item, record))
    results = _results(records) | {
        "config": {"model": engine, "model_args": {"pretrained": model}, "ablation": ablation.encode()},
        "date": when.timestamp(),
        "cs_localize_version": __version__,
        "task_hashes": {task: _task_hash(rows) for task, rows in samples.items()},
        "model_source": engine,
        "model_name": model,
        "model_name_sanitized": re.sub(r"[\"<>:/|\\?*\[\]]+", "__", model),
    }
    make_samples_folder(folder)
    try:
        for old in (*folder.glob("results_*.json"), *folder.glob("samples_*.jsonl")):
            old.unlink()
        write_text(folder / f"results_{date}.json", _json(results, indent=2))
        for task, rows in samples.items():
            write_text(folder / f"samples_{task}_{date}.jsonl", "".join(f"{_json(row)}\n" for row in rows))
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}; choose another folder") from None


def _sample(item: Item, record: Record) -> dict[str, Any]:
    number = item.id.rpartition("/")[2]
    return {
        "doc_id": int(number) if number.isdecimal() and item.boundary == "lm-eval" else item.id,
        "doc": record.doc,
        "target": str(record.target),
        "arguments": {
            f"gen_args_{i}": {f"arg_{j}": value for j, value in enumerate(arguments)}
            for i, arguments in enumerate(record.arguments)
        },
        "resps": [[_texts(response)] for response in record.responses],
        "filtered_resps": [_texts(response) for response in record.filtered],
        "filter": record.filter,
        "metrics": list(record.metrics),
        "doc_hash": _hash(_json(record.doc, indent=2)),
        "prompt_hash": _hash(str(record.arguments[0][0])),
        "target_hash": _hash(str(record.target)),
        **record.metrics,
    }


def _results(records: Mapping[str, Sequence[tuple[Item, Record]]]) -> dict[str, Any]:
    """The part of a results file that is about tasks."""
    found: dict[str, dict[str, Any]] = {
        name: {}
        for name in ("results", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")
    }
    groups: dict[str, Any] = {}
    for name, pairs in records.items():
        members: dict[str, list[Record]] = {}
        for _, record in pairs:
            members.setdefault(record.task, []).append(record)
        grouped = list(members) != [name]
        if grouped:
            groups[name] = found["results"][name] = _levels(name, [record for _, record in pairs])
        found["group_subtasks"][name] = list(members) if grouped else []
        for member, own in members.items():
            found["results"][member] = _levels(member, own)
            found["configs"][member] = {
                "task": member,
                "num_fewshot": own[0].shots,
                "metadata": {"version": own[0].version},
            }
            found["versions"][member] = own[0].version
            found["n-shot"][member] = own[0].shots
            found["higher_is_better"][member] = dict.fromkeys(own[0].metrics, True)
            found["n-samples"][member] = {"original": len(own), "effective": len(own)}
    return found | ({"groups": groups} if groups else {})


def _levels(alias: str, records: Sequence[Record]) -> dict[str, Any]:
    """Mean and standard error of every metric, over the questions that have it."""
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        for metric, value in record.metrics.items():
            values.setdefault((metric, record.filter), []).append(value)
    levels: dict[str, Any] = {"alias": alias, "sample_len": len(records)}
    for (metric, filtered_by), own in values.items():
        levels[f"{metric},{filtered_by}"] = statistics.fmean(own)
        error = statistics.stdev(own) / math.sqrt(len(own)) if len(own) > 1 else "N/A"
        levels[f"{metric}_stderr,{filtered_by}"] = error
    return levels


def _texts(value: object) -> object:
    """Text in the place of every number, as lm-eval writes responses."""
    return [_texts(one) for one in value] if isinstance(value, list | tuple) else str(value)


def _task_hash(rows: Iterable[Mapping[str, Any]]) -> str:
    return _hash("".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, default=str, ensure_ascii=False)
