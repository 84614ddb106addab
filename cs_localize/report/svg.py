"""Writing SVG: elements, the line chart's axes, and the strength of a colour."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def text_content(text: str) -> str:
    """Text fit for an element or a quoted attribute; characters that XML forbids become U+FFFD."""
    return escape(_NOT_XML.sub("\ufffd", text), quote=True)


def element(tag: str, content: str = "", **attributes: str | float) -> str:
    """One SVG element.

    Args:
        tag: its name.
        content: what it holds, already SVG.
        **attributes: ``class_`` and ``fill_opacity`` are written ``class`` and ``fill-opacity``; numbers are rounded
            to hundredths.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text_content(_value(value))}"' for name, value in attributes.items()
    )
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def label(x: float, y: float, text: str, anchor: str = "middle", class_: str = "tick") -> str:
    """A piece of text at a point; ``anchor`` is start, middle or end."""
    return element("text", text_content(text), x=x, y=y, text_anchor=anchor, class_=class_)


def tooltip(text: str) -> str:
    """The hover text of the element that holds it."""
    return element("title", text_content(text))


def strength(value: float, limit: float) -> float:
    """Place of a value on a zero-centred scale: -1 at ``-limit``, 0 at 0, 1 at ``limit``; clipped, 0 if limit is 0."""
    return max(-1.0, min(1.0, value / limit)) if limit > 0 else 0.0


def side(value: float) -> str:
    """The class that picks the colour: ``gain`` below zero, ``loss`` otherwise."""
    return "gain" if value < 0 else "loss"


@dataclass(frozen=True)
class Axes:
    """The frame of a line chart of accuracies, 0 to 1, over positions in pixels.

    Attributes:
        width: of the whole picture.
        height: of the whole picture.
        place: from a value on the horizontal axis to its share of that axis, 0 to 1.
    """

    width: int
    height: int
    place: Callable[[float], float]

    LEFT = 46
    RIGHT = 14
    TOP = 10
    BOTTOM = 40

    def x(self, value: float) -> float:
        """Horizontal position of a value."""
        return self.LEFT + self.place(value) * (self.width - self.LEFT - self.RIGHT)

    def y(self, accuracy: float) -> float:
        """Vertical position of an accuracy."""
        return self.TOP + (1 - accuracy) * (self.height - self.TOP - self.BOTTOM)

    def frame(self, ticks: Sequence[int], name: str) -> str:
        """Grid lines, tick labels and the name of the horizontal axis."""
        parts = []
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            y = self.y(share)
            parts.append(element("line", x1=self.LEFT, x2=self.width - self.RIGHT, y1=y, y2=y, class_="grid"))
            parts.append(label(self.LEFT - 7, y + 4, f"{100 * share:.0f}%", "end"))
        parts += [label(self.x(tick), self.y(0) + 17, str(tick)) for tick in ticks]
        parts.append(label((self.LEFT + self.width - self.RIGHT) / 2, self.height - 5, name, class_="axis"))
        return "".join(parts)

    def curve(self, points: Iterable[tuple[float, float, str]], class_: str) -> str:
        """A line through (value, accuracy) with a dot and a hover text at every point."""
        places = [(self.x(value), self.y(accuracy), text) for value, accuracy, text in points]
        line = " ".join(f"{_value(x)},{_value(y)}" for x, y, _ in places)
        dots = "".join(element("circle", tooltip(text), cx=x, cy=y, r=3.5, class_=class_) for x, y, text in places)
        return element("polyline", points=line, class_=class_) + dots


def picture(width: float, height: float, name: str, content: str, **attributes: str | float) -> str:
    """The SVG root with an accessible name. It shrinks with its container and never grows past its natural size."""
    view_box = f"0 0 {_value(width)} {_value(height)}"
    return element(
        "svg", content, **attributes, viewBox=view_box, width=width, height=height, role="img", aria_label=name
    )


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{round(value, 2) + 0.0:g}"
