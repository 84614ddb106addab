"""The figures of the report as SVG: pure functions of the findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources

from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.findings import DosePoint, HeadsFile, RankedHead
from cs_localize.heads import Head
from cs_localize.report.numbers import interval, nats, or_dash, percent, plural, spread
from cs_localize.report.svg import Axes, element, label, picture, side, strength, tooltip

CELL = 15
_LEFT = 40
_RIGHT = 4
_TOP = 2
_AXIS = 36
_LEGEND = 34
_TITLE = 26
_SWATCHES = 21


def heatmap_size(heads_file: HeadsFile) -> tuple[int, int]:
    """Width and height of the heat map in pixels, without a title."""
    width = max(_LEFT + heads_file.layers * CELL + _RIGHT, 330)
    return width, _TOP + heads_file.heads * CELL + _AXIS + _LEGEND


def heatmap(heads_file: HeadsFile, task: str) -> str:
    """Effects of all heads on one task, layers across and heads down, for a page that holds the figures' style.

    Raises:
        UsageError: if the file has no such task.
        CsLocalizeError: if it ranks or names a head that the model does not have.
    """
    width, height = heatmap_size(heads_file)
    return picture(width, height, f"Effect of every head on {task}", _heatmap_body(heads_file, task))


def heatmap_svg(heads_file: HeadsFile, task: str) -> str:
    """The same heat map as a file of its own, with title, background and both colour schemes.

    Raises:
        UsageError: if the file has no such task.
        CsLocalizeError: if it ranks or names a head that the model does not have.
    """
    width, height = heatmap_size(heads_file)
    style = element("style", stylesheet("figures.css"))
    ground = element("rect", x=0, y=0, width=width + 24, height=height + _TITLE + 16, class_="ground")
    title = label(_LEFT, 17, f"{task}: score lost when a head is zeroed", "start", "title")
    body = element("g", title + _shifted(_heatmap_body(heads_file, task), _TITLE), transform="translate(12 8)")
    name = f"Effect of every head on {task}"
    xmlns = "http://www.w3.org/2000/svg"
    return picture(width + 24, height + _TITLE + 16, name, style + ground + body, xmlns=xmlns) + "\n"


def knockout_curve(
    target: Sequence[float], controls: Sequence[float], named: int, random_drops: Sequence[float] = ()
) -> str:
    """Accuracy with the first k heads zeroed: the named ones, then the others of the ranking.

    Args:
        target: accuracy of the task at k = 0, 1, ….
        controls: mean accuracy of its controls; empty if it has none.
        named: heads named, marked by a line.
        random_drops: drop of the task in every draw of as many random heads, shown as ticks at ``named``.
    """
    last = max(len(target) - 1, 1)
    axes = Axes(336, 210, lambda k: k / last)
    parts = [axes.frame(range(last + 1), "heads zeroed, the named ones first")]
    if named:
        x = axes.x(named)
        parts.append(element("line", x1=x, x2=x, y1=axes.y(1), y2=axes.y(0), class_="mark"))
        for drop in random_drops:
            y = axes.y(target[0] - drop)
            text = tooltip(f"{plural(named, 'random head')}: {percent(target[0] - drop)}")
            parts.append(element("line", text, x1=x - 7, x2=x + 7, y1=y, y2=y, class_="random"))
    parts.append(axes.curve([(k, a, f"controls, k = {k}: {percent(a)}") for k, a in enumerate(controls)], "controls"))
    parts.append(axes.curve([(k, a, f"target, k = {k}: {percent(a)}") for k, a in enumerate(target)], "target"))
    return picture(axes.width, axes.height, "Accuracy against the number of heads zeroed", "".join(parts))


def dose_curve(dose: Sequence[DosePoint], heads_accuracy: float | None, named: int) -> str:
    """Accuracy against the number of located neurons zeroed, on a logarithmic axis.

    Args:
        dose: at least one point; more neurons to the right.
        heads_accuracy: accuracy of the task with the named heads zeroed, a level to compare with.
        named: how many heads those are.
    """
    ordered = sorted(dose, key=lambda point: point.neurons)
    low, high = math.log(max(ordered[0].neurons, 1)), math.log(max(ordered[-1].neurons, 2))
    reach = max(high - low, 1e-9)
    axes = Axes(420, 230, lambda n: (math.log(max(n, 1)) - low) / reach)
    parts = [
        axes.frame(_apart([p.neurons for p in ordered], axes), "neurons zeroed, highest attribution first (log scale)")
    ]
    if heads_accuracy is not None:
        y = axes.y(heads_accuracy)
        parts.append(element("line", x1=axes.LEFT, x2=axes.width - axes.RIGHT, y1=y, y2=y, class_="mark"))
        text = f"{plural(named, 'named head')} zeroed: {percent(heads_accuracy)}"
        parts.append(label(axes.LEFT + 4, y - 5 if heads_accuracy < 0.9 else y + 13, text, "start"))
    for kind in ("controls", "target"):
        marks = [(p.neurons, getattr(p, kind), _dose_text(kind, p)) for p in ordered]
        parts.append(axes.curve(marks, kind))
    return picture(axes.width, axes.height, "Accuracy against the number of neurons zeroed", "".join(parts))


def head_text(entry: RankedHead, role: str) -> str:
    """What a heat map says of a head: effect with interval, specificity, the control it hurts most, its role."""
    if entry.effect is None:
        return f"{entry.head}: no effect is estimated{role}"
    bounds = f" {interval(entry.interval, nats)}" if entry.interval else ""
    against = f" against {entry.strongest_control}" if entry.strongest_control else ""
    specificity = f"specificity {or_dash(entry.specificity, spread)}{against}"
    return f"{entry.head}: effect {nats(entry.effect)} nats{bounds}, {specificity}{role}"


def stylesheet(name: str) -> str:
    """A style sheet or script of this package."""
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _heatmap_body(heads_file: HeadsFile, task: str) -> str:
    if task not in heads_file.tasks:
        raise UsageError(f"heads.json has no task '{task}'; it has {', '.join(heads_file.tasks)}")
    finding = heads_file.tasks[task]
    limit = max((abs(entry.effect or 0.0) for entry in finding.ranking), default=0.0)
    roles = dict.fromkeys(heads_file.universal, ", universal") | dict.fromkeys(finding.named, ", named")
    cells = [_cell(heads_file, entry, limit, roles.get(entry.head, "")) for entry in finding.ranking]
    outlines = [_outline(heads_file, head, "universal") for head in heads_file.universal]
    outlines += [_outline(heads_file, head, "named") for head in finding.named]
    parts = [_ground(heads_file), *cells, *outlines, _heatmap_axes(heads_file), _legend(heads_file, limit)]
    return _shifted("".join(parts), _TOP)


def _corner(heads_file: HeadsFile, name: str) -> tuple[int, int]:
    head = Head.parse(name)
    if head.layer >= heads_file.layers or head.head >= heads_file.heads:
        raise CsLocalizeError(
            f"heads.json lists {name}, but its model has {heads_file.layers} layers of {heads_file.heads} heads"
        )
    return _LEFT + head.layer * CELL, head.head * CELL


def _cell(heads_file: HeadsFile, entry: RankedHead, limit: float, role: str) -> str:
    x, y = _corner(heads_file, entry.head)
    effect = entry.effect or 0.0
    opacity = abs(strength(effect, limit))
    text = tooltip(head_text(entry, role))
    size = CELL - 1
    return element("rect", text, x=x, y=y, width=size, height=size, class_=side(effect), fill_opacity=opacity)


def _outline(heads_file: HeadsFile, name: str, class_: str) -> str:
    x, y = _corner(heads_file, name)
    return element("rect", x=x - 0.5, y=y - 0.5, width=CELL, height=CELL, class_=class_)


def _ground(heads_file: HeadsFile) -> str:
    width, height = heads_file.layers * CELL + 1, heads_file.heads * CELL + 1
    return element("rect", x=_LEFT - 1, y=-1, width=width, height=height, class_="cells")


def _heatmap_axes(heads_file: HeadsFile) -> str:
    bottom = heads_file.heads * CELL
    middle = CELL / 2
    across = [i for i in range(heads_file.layers) if i % 5 == 0]
    down = [i for i in range(heads_file.heads) if i % (2 if heads_file.heads <= 12 else 4) == 0]
    layers = [label(_LEFT + i * CELL + middle, bottom + 14, str(i)) for i in across]
    heads = [label(_LEFT - 6, i * CELL + middle + 3.5, str(i), "end") for i in down]
    name = label(_LEFT + heads_file.layers * CELL / 2, bottom + 29, "layer", class_="axis")
    turned = element("g", label(0, 0, "head", class_="axis"), transform=f"translate(11 {bottom / 2:g}) rotate(-90)")
    return "".join([*layers, *heads, name, turned])


def _legend(heads_file: HeadsFile, limit: float) -> str:
    top = heads_file.heads * CELL + _AXIS
    half = _SWATCHES // 2
    parts = [element("rect", x=_LEFT, y=top + 3, width=6 * _SWATCHES, height=9, class_="cells")]
    for i in range(_SWATCHES):
        place = (i - half) / half
        look = side(place), abs(place)
        parts.append(
            element("rect", x=_LEFT + i * 6, y=top + 3, width=6, height=9, class_=look[0], fill_opacity=look[1])
        )
    parts.append(element("rect", x=_LEFT, y=top + 3, width=6 * _SWATCHES, height=9, class_="edge"))
    for place in (-1, 0, 1):
        x = _LEFT + (place * half + half + 0.5) * 6
        parts.append(label(x, top + 25, nats(place * limit)))
    x = _LEFT + 6 * _SWATCHES + 22
    for name in ("named", "universal"):
        parts.append(element("rect", x=x, y=top + 2, width=10, height=10, class_=name))
        parts.append(label(x + 16, top + 11, name, "start"))
        x += 70
    parts.append(label(_LEFT + 6 * _SWATCHES + 22, top + 25, "nats of score lost", "start"))
    return "".join(parts)


def _shifted(content: str, down: int) -> str:
    return element("g", content, transform=f"translate(0 {down})")


def _apart(ticks: Sequence[int], axes: Axes) -> list[int]:
    """The ticks whose labels do not run into the one before."""
    kept: list[int] = []
    for tick in ticks:
        if not kept or axes.x(tick) - axes.x(kept[-1]) > 20:
            kept.append(tick)
    return kept


def _dose_text(kind: str, point: DosePoint) -> str:
    accuracy = point.target if kind == "target" else point.controls
    return f"{kind}, {plural(point.neurons, 'neuron')}: {percent(accuracy)}"
