"""The cross-check of one task as the page shows it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from markupsafe import Markup

from cs_localize.findings import ConditionDrop, HeadsFile, NeuronSet, OverlapMeasure, TaskCrosscheck
from cs_localize.report.figures import dose_curve
from cs_localize.report.numbers import count, percent, plural, points, ratio, small_percent
from cs_localize.report.tables import Cell, MatrixRow, drop_cell, drop_limit

_NAMES = {
    "heads": "named heads",
    "neurons": "CNL neurons",
    "both": "both",
    "random_neurons": "random neurons",
}


@dataclass(frozen=True)
class CrosscheckView:
    """Heads against neurons for one task.

    Attributes:
        task: the target.
        verdict: the comparison in one sentence.
        columns: tasks measured, the target first.
        rows: one a condition; one more cell than columns, the mean of the other tasks.
        dose: the dose curve, or None if it was not measured.
        facts: pairs of what was measured and its value.
        overlaps: name, max, min, IoU and chance of CNL and of KN.
        rule: how neurons were kept.
        neurons: the located neurons.
    """

    task: str
    verdict: str
    columns: list[str]
    rows: list[MatrixRow]
    dose: Markup | None
    facts: list[tuple[str, str]]
    overlaps: list[tuple[str, str, str, str, str]]
    rule: str
    neurons: list[str]


def crosscheck_view(heads: HeadsFile, task: str, found: TaskCrosscheck) -> CrosscheckView:
    """Everything the page says of one cross-checked task."""
    measured = list(dict.fromkeys(name for drops in found.conditions.values() for name in drops))
    columns = [task, *(name for name in measured if name != task)]
    limit = drop_limit(drop for drops in found.conditions.values() for drop in drops.values())
    named = heads.tasks[task].named
    details = {"heads": " ".join(named), "neurons": count(found.neurons.count), "random_neurons": "mean over draws"}
    level = found.conditions.get("heads", {}).get(task)
    return CrosscheckView(
        task=task,
        verdict=found.verdict,
        columns=columns,
        rows=[
            MatrixRow(_NAMES.get(name, name), details.get(name, ""), _cells(drops, columns, limit))
            for name, drops in found.conditions.items()
        ],
        dose=Markup(dose_curve(found.dose, level.accuracy if level else None, len(named))) if found.dose else None,
        facts=_facts(found),
        overlaps=[
            _overlap("CNL, two halves of the items", found.neurons.overlap),
            _overlap("KN, pairs of single items", found.neurons.knowledge_neurons),
        ],
        rule=found.neurons.rule,
        neurons=found.neurons.neurons,
    )


def _cells(drops: dict[str, ConditionDrop], columns: list[str], limit: float) -> list[Cell]:
    own, *others = columns
    cells = [drop_cell(drops.get(name), limit, name, name == own) for name in columns]
    known = [drops[name].drop for name in others if name in drops]
    return [*cells, Cell(points(fmean(known)), "mean of the other tasks") if known else drop_cell(None, 0, "", False)]


def _facts(found: TaskCrosscheck) -> list[tuple[str, str]]:
    located: NeuronSet = found.neurons
    return [
        ("Neurons located", f"{count(located.count)}, {small_percent(located.ratio)} of all FFN neurons"),
        ("Located on", plural(located.items, "search item")),
        ("Completeness of the attribution", f"r = {ratio(located.completeness)}"),
        ("Attribution left with the named heads zeroed", percent(located.attribution_with_heads_zeroed)),
        ("The same with random heads zeroed", percent(located.random_attribution_with_heads_zeroed)),
        ("IPP of the named heads", f"{points(found.ipp.heads)} points"),
        ("IPP of the located neurons", f"{points(found.ipp.neurons)} points"),
    ]


def _overlap(name: str, measure: OverlapMeasure) -> tuple[str, str, str, str, str]:
    return name, ratio(measure.max), ratio(measure.min), ratio(measure.iou), ratio(measure.chance)
