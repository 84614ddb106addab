"""Which questions are searched with and which confirm: two sides that share nothing, from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cs_localize.errors import UsageError
from cs_localize.outcomes import Item


@dataclass(frozen=True)
class Split:
    """Items to search heads with, and items to confirm them on. The two sides share no family.

    Attributes:
        search: items of the search, ordered so that a smaller search is a prefix of a larger one.
        held_out: items of the confirmation, ordered likewise.
        left_out: questions of either side that cannot be asked, with the reason.
    """

    search: tuple[Item, ...]
    held_out: tuple[Item, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


def split_questions(
    task: str, families: Mapping[str, str], seed: int, search: int | None = None, held_out: int | None = None
) -> tuple[list[str], list[str]]:
    """Divides the questions of a task into two sides, whole families at a time.

    Families are put into an order that depends on nothing but the seed, the task's name and their own names. The
    search takes questions from its front, the confirmation from its back, so neither side changes when the other
    grows. A family that a requested number cuts through stays on its side; its remaining questions go unused.

    Args:
        task: the task's name.
        families: the family of every question, by the question's id.
        seed: any integer; record it.
        search: number of search questions; None takes what the other side leaves, or half if that is None too.
        held_out: number of held-out questions; None likewise.

    Returns:
        The ids of the search and of the held-out questions.

    Raises:
        UsageError: if a side would be empty, or if the two sides ask for more than the task has.
    """
    for side, count in (("search", search), ("held-out", held_out)):
        if count is not None and count < 1:
            raise UsageError(f"task '{task}': {count} {side} items asked for; ask for at least 1")
    ordered = _ordered(task, families, seed)
    if search is None and held_out is None:
        search = max(1, len(families) // 2)
    # At least one of the two is a number now.
    front = _needed(ordered, search)
    back = _needed(ordered[::-1], held_out)
    front = len(ordered) - back if search is None else front
    back = len(ordered) - front if held_out is None else back
    if front < 1 or back < 1 or front + back > len(ordered):
        raise UsageError(
            f"task '{task}' has {len(families)} questions in {len(ordered)} families, too few for "
            f"{_asked(search)} search and {_asked(held_out)} held-out items; ask for fewer"
        )
    return _first(ordered[:front], search), _first(ordered[::-1][:back], held_out)


def _first(families: Sequence[tuple[str, ...]], count: int | None) -> list[str]:
    return [question for family in families for question in family][:count]


def _ordered(task: str, families: Mapping[str, str], seed: int) -> list[tuple[str, ...]]:
    members: dict[str, list[str]] = {}
    for question, family in families.items():
        members.setdefault(family, []).append(question)
    # A digest for each family, not one shuffle of all: adding a question leaves the order of the others alone.
    order = sorted(members, key=lambda family: _digest(f"{seed}|{task}|{family}"))
    return [tuple(sorted(members[f], key=lambda q: _digest(f"{seed}|{task}|{q}"))) for f in order]


def _needed(families: Sequence[tuple[str, ...]], count: int | None) -> int:
    """How many families from the front hold ``count`` questions: 0 for None, one more than all if all hold fewer."""
    total = 0
    for needed, family in enumerate(families):
        if total >= (count or 0):
            return needed
        total += len(family)
    return len(families) + (total < (count or 0))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _asked(count: int | None) -> str:
    return "any" if count is None else str(count)
