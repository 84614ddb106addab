"""The rows of the report's tables, with every number already written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cs_localize.findings import ConditionDrop, ConfirmFile, Drop, HeadsFile
from cs_localize.report.losses import sweep_requests, task_loss
from cs_localize.report.numbers import (
    MISSING,
    count,
    fixed,
    interval,
    nats,
    or_dash,
    p_value,
    percent,
    points,
    ratio,
    span,
    spread,
)
from cs_localize.report.sureness import sureness
from cs_localize.report.svg import side, strength

SIGNIFICANT = 0.05
RANKED = 10


@dataclass(frozen=True)
class Cell:
    """A number on a coloured ground.

    Attributes:
        text: the number.
        hover: the same with its interval, in words.
        side: the class that picks the colour.
        tint: strength of the colour, 0 to 1.
        own: whether this is the task the row is about.
        strong: whether it differs from zero beyond chance.
    """

    text: str
    hover: str = ""
    side: str = "loss"
    tint: str = "0"
    own: bool = False
    strong: bool = False


@dataclass(frozen=True)
class MatrixRow:
    """One set of heads or one condition, and what every task loses under it."""

    name: str
    detail: str
    cells: list[Cell]


@dataclass(frozen=True)
class DropRow:
    """One cell of the matrix in plain numbers."""

    heads_of: str
    task: str
    before: str
    after: str
    drop: str
    ci: str
    p: str
    p_holm: str


@dataclass(frozen=True)
class CountRow:
    """What a task whose metric counts has left without one set of heads."""

    task: str
    heads_of: str
    before: str
    after: str
    share: str
    ci: str


@dataclass(frozen=True)
class ResultRow:
    """One task of the study; what was not measured is a dash."""

    task: str
    named: list[str]
    reason: str
    q: str
    frequency: str
    before: str
    items: str
    after: str
    drop: str
    drop_ci: str
    controls: str
    contrast: str
    contrast_ci: str
    random: str
    random_span: str
    requests: str


@dataclass(frozen=True)
class RankingRow:
    """One head near the top of a ranking."""

    head: str
    named: bool
    effect: str
    ci: str
    specificity: str
    specificity_mean: str
    strongest_control: str
    q: str
    frequency: str


@dataclass(frozen=True)
class PairRow:
    """Two heads that do more or less together than each by itself."""

    task: str
    heads: tuple[str, str]
    kind: str
    nats: str
    nats_ci: str
    accuracy: str
    accuracy_ci: str
    items: str
    p_holm: str


@dataclass(frozen=True)
class CostRow:
    """What the search of a task cost, beside two sweeps."""

    task: str
    items: str
    requests: str
    baseline: str
    tokens: str
    sweep: str
    sweep_tokens: str
    share: str
    thin: str


@dataclass(frozen=True)
class ScoringRow:
    """The score of one task beside its metric."""

    task: str
    score: str
    metric: str
    correlation: str
    sample: str
    sequences: str


@dataclass(frozen=True)
class FitRow:
    """How good a ground the search of a task stood on."""

    task: str
    items: str
    accuracy: str
    score: str
    tests: str
    overlap: str
    coherence: str
    fit: str
    fit_p: str


def result_rows(heads: HeadsFile, confirm: ConfirmFile | None) -> list[ResultRow]:
    """The main table, one row a task."""
    return [_result_row(heads, confirm, task) for task in heads.tasks]


def matrix_rows(heads: HeadsFile, confirm: ConfirmFile, columns: list[str]) -> list[MatrixRow]:
    """Heads zeroed down, tasks measured across; the universal heads come last."""
    rows = [(task, heads.tasks[task].named, drops) for task, drops in confirm.matrix.items()]
    limit = drop_limit(drop for _, _, drops in rows for drop in drops.values())
    limit = max(limit, drop_limit(confirm.universal.values()))
    if confirm.universal:
        rows.append(("universal heads", heads.universal, confirm.universal))
    return [
        MatrixRow(name, " ".join(named), [drop_cell(drops.get(task), limit, task, task == name) for task in columns])
        for name, named, drops in rows
    ]


def drop_rows(confirm: ConfirmFile) -> list[DropRow]:
    """The matrix again, one row a cell, with accuracies, intervals and p-values."""
    sets = dict(confirm.matrix)
    rows = [(name, task, drop) for name, drops in sets.items() for task, drop in drops.items()]
    rows += [("universal heads", task, drop) for task, drop in confirm.universal.items()]
    return [
        DropRow(
            heads_of=name,
            task=task,
            before=percent(confirm.baseline[task]),
            after=percent(drop.accuracy),
            drop=points(drop.drop),
            ci=interval(drop.ci, points),
            p=p_value(drop.p),
            p_holm=p_value(drop.p_holm),
        )
        for name, task, drop in rows
    ]


def count_rows(confirm: ConfirmFile) -> list[CountRow]:
    """Tasks whose metric counts under every head set."""
    return [
        CountRow(
            task=task,
            heads_of=heads_of,
            before=count(counts.baseline),
            after=count(left.count),
            share=percent(left.share),
            ci=interval(left.ci, percent),
        )
        for task, counts in confirm.counts.items()
        for heads_of, left in counts.without.items()
    ]


def drop_limit(drops: Iterable[Drop | ConditionDrop]) -> float:
    """The end of a colour scale that all the given drops share."""
    return max((abs(drop.drop) for drop in drops), default=0.0)


def drop_cell(drop: Drop | ConditionDrop | None, limit: float, task: str, own: bool) -> Cell:
    """A drop in points, coloured by its place between ``-limit`` and ``limit``."""
    if drop is None:
        return Cell(MISSING, "not measured", own=own)
    hover = f"{task}: {percent(drop.accuracy + drop.drop)} to {percent(drop.accuracy)}, "
    hover += f"drop {points(drop.drop)} points {interval(drop.ci, points)}"
    strong = not drop.ci[0] <= 0 <= drop.ci[1]
    if isinstance(drop, Drop):
        hover += f", p {p_value(drop.p_holm)} (Holm)"
        strong = drop.p_holm < SIGNIFICANT
    tint = fixed(abs(strength(drop.drop, limit)), 3)
    return Cell(points(drop.drop), hover, side(drop.drop), tint, own, strong)


def ranking_rows(heads: HeadsFile, task: str) -> list[RankingRow]:
    """The first heads of a ranking, and every named one."""
    finding = heads.tasks[task]
    shown = [entry for i, entry in enumerate(finding.ranking) if i < RANKED or entry.head in finding.named]
    return [
        RankingRow(
            head=entry.head,
            named=entry.head in finding.named,
            effect=or_dash(entry.effect, nats),
            ci=interval(entry.interval, nats) if entry.interval else MISSING,
            specificity=or_dash(entry.specificity, spread),
            specificity_mean=or_dash(entry.specificity_mean, spread),
            strongest_control=entry.strongest_control or MISSING,
            q=or_dash(entry.q, p_value),
            frequency=or_dash(entry.frequency, percent),
        )
        for entry in shown
    ]


def pair_rows(confirm: ConfirmFile) -> list[PairRow]:
    """The pairs that stand out, task by task, the strongest first."""
    found = confirm.interactions.tasks if confirm.interactions else {}
    return [
        PairRow(
            task=task,
            heads=pair.heads,
            kind=pair.kind,
            nats=nats(pair.nats),
            nats_ci=interval(pair.nats_ci, nats),
            accuracy=points(pair.accuracy),
            accuracy_ci=interval(pair.accuracy_ci, points),
            items=count(pair.items),
            p_holm=p_value(pair.p_holm),
        )
        for task, pairs in found.items()
        for pair in sorted(pairs, key=lambda pair: -abs(pair.nats))
        if pair.kind in ("backup", "redundant")
    ]


def universal_rows(heads: HeadsFile) -> list[MatrixRow]:
    """Universal heads down, their effect on every task across, in nats."""
    effects: Mapping[str, Mapping[str, float | None]] = {
        task: {entry.head: entry.effect for entry in finding.ranking} for task, finding in heads.tasks.items()
    }
    sizes = [effects[task].get(head) for head in heads.universal for task in effects]
    limit = max((abs(size) for size in sizes if size is not None), default=0.0)
    return [
        MatrixRow(head, "", [_effect_cell(effects[task].get(head), limit, f"{head} on {task}") for task in effects])
        for head in heads.universal
    ]


def cost_rows(heads: HeadsFile) -> list[CostRow]:
    """Requests and tokens a task; the sweep's tokens are reckoned at the mean tokens of a request of the search."""
    rows = []
    for task, finding in heads.tasks.items():
        sweep = sweep_requests(heads, task)
        asked = finding.requests + finding.baseline_requests
        rows.append(
            CostRow(
                task=task,
                items=count(finding.items),
                requests=count(finding.requests),
                baseline=count(finding.baseline_requests),
                tokens=count(finding.tokens),
                sweep=count(sweep),
                sweep_tokens=count(round(sweep * finding.tokens / asked)) if asked else MISSING,
                share=percent(finding.requests / sweep) if sweep else MISSING,
                thin=fixed(finding.requests / (heads.layers * heads.heads), 1),
            )
        )
    return rows


def scoring_rows(heads: HeadsFile) -> list[ScoringRow]:
    """What the search read of every task and what confirms it; none where the file does not say."""
    return [
        ScoringRow(
            task=task,
            score=found.score,
            metric=found.metric,
            correlation=MISSING if found.correlation is None else fixed(found.correlation, 2),
            sample=count(found.sample),
            sequences=fixed(found.sequences, 1),
        )
        for task, found in heads.scoring.items()
    ]


def fit_rows(heads: HeadsFile) -> list[FitRow]:
    """Unablated level, masks and fit of every task."""
    return [
        FitRow(
            task=task,
            items=count(finding.items),
            accuracy=or_dash(finding.baseline_accuracy, percent),
            score=or_dash(finding.baseline_score, nats),
            tests=or_dash(finding.tests_a_head, _tests),
            overlap=or_dash(finding.overlap, ratio),
            coherence=or_dash(finding.coherence, ratio),
            fit=or_dash(finding.fit, ratio),
            fit_p=or_dash(finding.fit_p, p_value),
        )
        for task, finding in heads.tasks.items()
    ]


def _result_row(heads: HeadsFile, confirm: ConfirmFile | None, task: str) -> ResultRow:
    finding = heads.tasks[task]
    loss = task_loss(confirm, task)
    contrast = loss.contrast if loss else None
    random = loss.random if loss else None
    q, frequency = sureness([finding])
    return ResultRow(
        task=task,
        named=finding.named,
        reason=finding.reason,
        q=q,
        frequency=frequency,
        before=percent(confirm.baseline[task]) if confirm else MISSING,
        items=f"n = {count(confirm.items[task])}" if confirm else "",
        after=percent(loss.drop.accuracy) if loss else MISSING,
        drop=points(loss.drop.drop) if loss else MISSING,
        drop_ci=interval(loss.drop.ci, points) if loss else "",
        controls=points(loss.controls) if loss and loss.controls is not None else MISSING,
        contrast=points(contrast[0]) if contrast else MISSING,
        contrast_ci=interval(contrast[1:], points) if contrast else "",
        random=points(random.mean_drop) if random else MISSING,
        random_span=f"{len(random.draws)} draws: {span(random.draws, points)}" if random and random.draws else "",
        requests=count(finding.requests),
    )


def _tests(number: float) -> str:
    return fixed(number, 0 if number == round(number) else 1)


def _effect_cell(effect: float | None, limit: float, where: str) -> Cell:
    if effect is None:
        return Cell(MISSING, "not ranked")
    tint = fixed(abs(strength(effect, limit)), 3)
    return Cell(nats(effect), f"{where}: {nats(effect)} nats", side(effect), tint)
