"""What a study found, in sentences built from its figures."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from cs_localize.findings import ConfirmFile, HeadsFile
from cs_localize.report.losses import TaskLoss, sweep_requests, task_loss
from cs_localize.report.numbers import count, fixed, listing, percent, points, span


def title(heads: HeadsFile) -> str:
    """The page's title: whose heads, for how many capabilities."""
    subject = next(iter(heads.tasks)) if len(heads.tasks) == 1 else f"{len(heads.tasks)} capabilities"
    return f"Attention heads behind {subject} in {heads.model}"


def headline(heads: HeadsFile, confirm: ConfirmFile | None) -> list[str]:
    """One sentence on what was found and held, one on what was not if anything, one on what it cost."""
    losses = {task: loss for task in heads.tasks if (loss := task_loss(confirm, task)) is not None}
    sentences = [_found(heads, losses) if confirm else _named_only(heads)]
    if confirm:
        sentences += _not_shown(heads, losses)
    return [*sentences, _cost(heads)]


def _found(heads: HeadsFile, losses: dict[str, TaskLoss]) -> str:
    held = {task: loss for task, loss in losses.items() if loss.specific}
    if not held:
        return f"No capability of {heads.model} could be tied to attention heads of its own."
    few = _few_heads(heads, held)
    if len(heads.tasks) == 1:
        (task, loss), *_ = held.items()
        start = f"Zeroing {few} of {_all_heads(heads)} takes {task} from {percent(loss.before)} to "
        start += f"{percent(loss.drop.accuracy)} on held-out items"
    else:
        start = f"{len(held)} of {len(heads.tasks)} capabilities depend on {few} each, of {_all_heads(heads)}: "
        start += f"with these zeroed, a capability loses {_shares(held)} of its held-out accuracy"
    return start + _beside(held) + "."


def _shares(held: dict[str, TaskLoss]) -> str:
    low, high = min(held, key=lambda task: held[task].share), max(held, key=lambda task: held[task].share)
    if low == high:
        return f"{percent(held[low].share)} ({low})"
    return f"{percent(held[low].share)} ({low}) to {percent(held[high].share)} ({high})"


def _beside(held: dict[str, TaskLoss]) -> str:
    controls = [loss.controls for loss in held.values() if loss.controls is not None]
    random = [loss.random.mean_drop for loss in held.values() if loss.random]
    parts = []
    if controls:
        parts.append(f"its controls lose {points(fmean(controls))} points on average")
    if random:
        parts.append(f"as many random heads of the same layers take {points(fmean(random))} points from it")
    return f", while {listing(parts)}" if parts else ""


def _not_shown(heads: HeadsFile, losses: dict[str, TaskLoss]) -> list[str]:
    empty = [task for task in heads.tasks if task not in losses]
    unspecific = [task for task, loss in losses.items() if not loss.specific]
    sentences = []
    if empty:
        sentences.append(f"No heads were named for {listing(empty)}.")
    if unspecific:
        sentences.append(f"The heads named for {listing(unspecific)} were not shown to hurt it more than its controls.")
    return sentences


def _named_only(heads: HeadsFile) -> str:
    found = [task for task, finding in heads.tasks.items() if finding.named]
    if not found:
        return f"No heads of {heads.model} could be named for {listing(list(heads.tasks))}."
    few = _few_heads(heads, found)
    many = f"{len(found)} of {len(heads.tasks)} capabilities" if len(heads.tasks) > 1 else found[0]
    return f"The search names {few} of {_all_heads(heads)} for {many}; held-out items have not confirmed them."


def _cost(heads: HeadsFile) -> str:
    spent = {task: finding.requests for task, finding in heads.tasks.items()}
    sweep = {task: sweep_requests(heads, task) for task in heads.tasks}
    each = " for each" if len(spent) > 1 else ""
    if not sum(spent.values()):
        return "The search took no requests of its own."
    times = fixed(sum(sweep.values()) / sum(spent.values()), 1)
    return (
        f"The search took {span(spent.values(), _whole)} masked requests{each}; "
        f"a sweep of every head on the same items takes {span(sweep.values(), _whole)} ({times} times as many)."
    )


def _few_heads(heads: HeadsFile, tasks: Iterable[str]) -> str:
    number = span((len(heads.tasks[task].named) for task in tasks), _whole)
    return "1 head" if number == "1" else f"{number} heads"


def _whole(value: float) -> str:
    return count(int(value))


def _all_heads(heads: HeadsFile) -> str:
    return f"{count(heads.layers * heads.heads)} in {heads.model}"
