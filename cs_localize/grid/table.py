"""heads.parquet and heads.csv: one row for every cell, task and named head."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cs_localize.findings import ConfirmFile, HeadsFile, new_file, write_text
from cs_localize.grid.config import Cell
from cs_localize.heads import Head
from cs_localize.report.losses import task_loss


@dataclass(frozen=True)
class HeadRow:
    """One named head of one task in one cell. Accuracies are shares of 1; None where nothing was measured.

    Attributes:
        model: short name of the model.
        task_set: name of the task set.
        method: name of the method.
        task: the task.
        head: the head, such as ``L16H21``.
        layer: its layer.
        rank: its place among the named heads of the task, from 1.
        universal: whether the study lists it as one that hurts nearly every task.
        effect: score lost without it, in nats a request; None where the method estimates none.
        effect_low: lower end of the effect's 95% interval.
        effect_high: upper end.
        specificity: effect in spreads of the task, minus that of the control it hurts most; None without effects.
        baseline_accuracy: held-out accuracy of the unmodified model.
        accuracy_gone: of that, what is gone with all named heads of the task zeroed.
        accuracy_gone_low: lower end of its 95% interval.
        accuracy_gone_high: upper end.
        accuracy_gone_up_to_rank: what is gone with the heads up to this one zeroed.
        controls_gone: mean accuracy the task's controls lose to all its named heads.
        requests: masked search requests of the task.
        tokens: tokens of all its search requests.
    """

    model: str
    task_set: str
    method: str
    task: str
    head: str
    layer: int
    rank: int
    universal: bool
    effect: float | None
    effect_low: float | None
    effect_high: float | None
    specificity: float | None
    baseline_accuracy: float | None
    accuracy_gone: float | None
    accuracy_gone_low: float | None
    accuracy_gone_high: float | None
    accuracy_gone_up_to_rank: float | None
    controls_gone: float | None
    requests: int
    tokens: int


COLUMNS = tuple(field.name for field in fields(HeadRow))

_TYPES = {
    "str": pa.string(),
    "int": pa.int64(),
    "bool": pa.bool_(),
    "float | None": pa.float64(),
}
_SCHEMA = pa.schema(
    [pa.field(field.name, _TYPES[str(field.type)], nullable="None" in str(field.type)) for field in fields(HeadRow)],
    metadata={"cs_localize.schema": "1"},
)


def head_rows(cell: Cell, heads: HeadsFile, confirm: ConfirmFile | None) -> Iterator[HeadRow]:
    """The rows of one finished cell, task by task, in the order the heads were named."""
    for task, finding in heads.tasks.items():
        loss = task_loss(confirm, task)
        curve = confirm.curve.get(task, []) if confirm else []
        ranked = {ranked.head: ranked for ranked in finding.ranking}
        for rank, head in enumerate(finding.named, 1):
            low, high = ranked[head].interval or (None, None)
            yield HeadRow(
                model=cell.model,
                task_set=cell.task_set,
                method=cell.method,
                task=task,
                head=head,
                layer=Head.parse(head).layer,
                rank=rank,
                universal=head in heads.universal,
                effect=ranked[head].effect,
                effect_low=low,
                effect_high=high,
                specificity=ranked[head].specificity,
                baseline_accuracy=loss.before if loss else None,
                accuracy_gone=loss.drop.drop if loss else None,
                accuracy_gone_low=loss.drop.ci[0] if loss else None,
                accuracy_gone_high=loss.drop.ci[1] if loss else None,
                accuracy_gone_up_to_rank=curve[0] - curve[rank] if rank < len(curve) else None,
                controls_gone=loss.controls if loss else None,
                requests=finding.requests,
                tokens=finding.tokens,
            )


def write_tables(out: Path, rows: Sequence[HeadRow]) -> tuple[Path, Path]:
    """Writes ``heads.parquet`` and ``heads.csv`` with the same rows; an empty field of the CSV was not measured.

    Returns:
        The two paths.
    """
    records = [asdict(row) for row in rows]
    parquet, text = out / "heads.parquet", out / "heads.csv"
    with new_file(parquet) as temporary:
        pq.write_table(pa.Table.from_pylist(records, schema=_SCHEMA), temporary, compression="zstd")
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(text, stream.getvalue())
    return parquet, text
