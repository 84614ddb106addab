"""Running a grid of ablations: chunk after chunk to Parquet, with the ledger behind it."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cs_localize.ablate.conditions import AblationGrid, Condition
from cs_localize.ablate.effects import SUMMARY_COLUMNS, ConditionEffect, effect_on
from cs_localize.asking import fitting
from cs_localize.config import EngineConfig
from cs_localize.errors import UsageError
from cs_localize.findings import new_file
from cs_localize.folder import make_folder
from cs_localize.heads import Ablation
from cs_localize.measure.progress import Progress
from cs_localize.measure.protocol import Measurer, Mode
from cs_localize.outcomes import Item, Outcome
from cs_localize.recover import holm
from cs_localize.session import open_session
from cs_localize.tasks import Capability, get_task

_CHUNK = 20_000  # requests measured, written and forgotten at a time
_SCHEMA = pa.schema(
    [
        pa.field("model", pa.string(), nullable=False),
        pa.field("heads_of", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("part", pa.string(), nullable=False),
        pa.field("heads", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("scale", pa.float64()),
        pa.field("intervention", pa.string(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("item", pa.string(), nullable=False),
        pa.field("correct", pa.bool_(), nullable=False),
        pa.field("baseline_correct", pa.bool_(), nullable=False),
        pa.field("score", pa.float64()),
        pa.field("baseline_score", pa.float64()),
        pa.field("response", pa.string()),
        pa.field("tokens", pa.int64(), nullable=False),
    ],
    metadata={"cs_localize.schema": "1"},
)
ROW_COLUMNS = tuple(_SCHEMA.names)


@dataclass(frozen=True)
class AblationGridResult:
    """What a grid of ablations left on disk.

    Attributes:
        rows: ``ablation.parquet``, one row for every condition, task and item.
        summary: ``summary.csv``, one row for every condition and task.
        effects: the rows of the summary.
    """

    rows: Path
    summary: Path
    effects: tuple[ConditionEffect, ...]


def ablation_grid(
    model: str,
    grid: AblationGrid,
    items: Mapping[str, Sequence[Item]],
    *,
    out: Path,
    mode: Mode = "generate",
    engine: EngineConfig | None = None,
    ledger: Path | None = None,
    tasks: Mapping[str, Capability] | None = None,
    mean_items: Sequence[Item] = (),
) -> AblationGridResult:
    """Measures every item under every condition and without any, and writes what came back.

    Items that do not fit the model are left out, with a warning.
    What the ledger holds is not measured again, so the same call continues a stopped one. Memory does not grow with the
    number of items under conditions, only with the rows of the summary, the baseline and the ledger.

    Args:
        model: a directory, a hub id or a built-in model name.
        grid: the conditions.
        items: what is asked, by task; see ``held_out``.
        out: folder of the two tables; made when missing.
        mode: ``generate`` grades generated answers with each task's own metric; ``score`` teacher-forces the reference
            answer, reports its log-probability, and takes it for right where every token ranks first.
        engine: which engine, and how many; vLLM by default.
        ledger: folder of measured outcomes. Default: ``ledger`` in ``out``.
        tasks: the tasks of the items by name, where ``load_tasks`` read them with options of one's own.
        mean_items: items on whose prompts the means of heads are measured, for grids with the scale ``mean``.

    Raises:
        CsLocalizeError: if anything asked for cannot be had; what was measured stays in the ledger.
    """
    if not items or not all(items.values()):
        raise UsageError("a grid of ablations needs at least one task, and an item of each")
    means = "mean" in grid.scales
    if means and not mean_items:
        raise UsageError("the scale 'mean' needs items to measure the means of heads on")
    make_folder(out)
    rows, summary = out / "ablation.parquet", out / "summary.csv"
    for file in (rows, summary):
        if file.is_dir():  # said before anything is measured
            raise UsageError(f"{file} is a folder; choose another folder with --out")
    with closing(Progress(out / "events.jsonl")) as progress:
        known = tasks or {name: get_task(name) for name in items}
        opened = open_session(
            model, engine or EngineConfig(), known, ledger or out / "ledger", progress, mean_items if means else ()
        )
        with opened as session, new_file(rows) as file, pq.ParquetWriter(file, _SCHEMA, compression="zstd") as writer:
            run = _Run(model, grid.seed, fitting(items, session.measurer, progress), mode, session.measurer)
            for table in run.tables(grid.conditions(session.shape)):
                writer.write_table(table)
    effects = _corrected(run.effects)
    with new_file(summary) as file, file.open("w", encoding="utf-8", newline="") as stream:
        lines = csv.DictWriter(stream, SUMMARY_COLUMNS, lineterminator="\n")
        lines.writeheader()
        lines.writerows(asdict(effect) for effect in effects)
    return AblationGridResult(rows, summary, effects)


class _Run:
    """The measuring of one grid; ``effects`` fills as the tables are drawn."""

    def __init__(
        self, model: str, seed: int, items: Mapping[str, Sequence[Item]], mode: Mode, measurer: Measurer
    ) -> None:
        self.effects: list[ConditionEffect] = []
        self._model = model
        self._seed = seed
        self._items = items
        self._mode: Mode = mode
        self._measurer = measurer
        self._flat = [item for asked in items.values() for item in asked]

    def tables(self, conditions: Sequence[Condition]) -> Iterator[pa.Table]:
        """Measures and yields the rows of as many conditions at a time as make a chunk."""
        baseline = self._measure([Ablation()], "baseline")
        at_once = max(1, _CHUNK // len(self._flat))
        for start in range(0, len(conditions), at_once):
            chunk = conditions[start : start + at_once]
            # Condition by condition, so that requests under one ablation share their few-shot prefix in the cache.
            outcomes = iter(self._measure([condition.ablation for condition in chunk], "ablate"))
            for condition in chunk:
                after = [next(outcomes) for _ in self._flat]
                self._summarise(condition, baseline, after)
                yield self._table(condition, baseline, after)

    def _measure(self, ablations: Sequence[Ablation], stage: str) -> list[Outcome]:
        asked = [self._measurer.request(item, ablation, self._mode) for ablation in ablations for item in self._flat]
        return self._measurer.measure(asked, stage)

    def _summarise(self, condition: Condition, before: Sequence[Outcome], after: Sequence[Outcome]) -> None:
        start = 0
        for task, items in self._items.items():
            here = slice(start, start + len(items))
            start += len(items)
            flags = [outcome.correct for outcome in before[here]], [outcome.correct for outcome in after[here]]
            effect = effect_on(task, flags[0], flags[1], self._seed, condition.ablation.key)
            lost = [b.score - a.score for b, a in zip(before[here], after[here], strict=True)]
            self.effects.append(
                ConditionEffect(
                    model=self._model,
                    heads_of=condition.heads_of,
                    kind=condition.kind,
                    part=condition.part,
                    heads=_listed(condition),
                    size=len(condition.heads),
                    scale=_factor(condition),
                    intervention=_intervention(condition),
                    task=task,
                    items=effect.items,
                    baseline=effect.baseline,
                    accuracy=effect.accuracy,
                    drop=effect.drop,
                    drop_low=effect.ci[0],
                    drop_high=effect.ci[1],
                    p=effect.p,
                    p_holm=effect.p,
                    damage=float(np.mean(lost)) if self._mode == "score" else None,
                )
            )

    def _table(self, condition: Condition, before: Sequence[Outcome], after: Sequence[Outcome]) -> pa.Table:
        rows = len(self._flat)
        columns = {
            "model": [self._model] * rows,
            "heads_of": [condition.heads_of] * rows,
            "kind": [condition.kind] * rows,
            "part": [condition.part] * rows,
            "heads": [_listed(condition)] * rows,
            "size": [len(condition.heads)] * rows,
            "scale": [_factor(condition)] * rows,
            "intervention": [_intervention(condition)] * rows,
            "task": [item.task for item in self._flat],
            "item": [item.id for item in self._flat],
            "correct": [outcome.correct for outcome in after],
            "baseline_correct": [outcome.correct for outcome in before],
            "score": [_finite(outcome.score) for outcome in after],
            "baseline_score": [_finite(outcome.score) for outcome in before],
            "response": [outcome.text if self._mode == "generate" else None for outcome in after],
            "tokens": [outcome.tokens for outcome in after],
        }
        return pa.table(columns, schema=_SCHEMA)


def _corrected(effects: Sequence[ConditionEffect]) -> tuple[ConditionEffect, ...]:
    """Corrects over the different tests: conditions of two kinds may be the same heads, and then are one test."""
    tests = [(frozenset(effect.heads.split(",")), effect.intervention, effect.task) for effect in effects]
    p = dict(zip(tests, (effect.p for effect in effects), strict=True))
    corrected = dict(zip(p, holm(np.array(list(p.values()))), strict=True))
    return tuple(replace(effect, p_holm=float(corrected[test])) for effect, test in zip(effects, tests, strict=True))


def _factor(condition: Condition) -> float | None:
    """A mean is no factor."""
    return None if condition.scale == "mean" else condition.scale


def _intervention(condition: Condition) -> str:
    return "mean" if condition.scale == "mean" else repr(condition.scale).removesuffix(".0")


def _listed(condition: Condition) -> str:
    return ",".join(map(str, condition.heads))


def _finite(score: float) -> float | None:
    """A generated answer has no score."""
    return score if math.isfinite(score) else None
