"""What a capability is: questions with answers, one fixed prompt format, one split, one metric."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cs_localize.errors import UsageError
from cs_localize.outcomes import Item
from cs_localize.tasks.graders import first_line_equals


@dataclass(frozen=True)
class Question:
    """One question of a task, without its prompt format.

    Attributes:
        id: unique within the task and stable across versions of the question list.
        text: what the template is filled with.
        answer: the reference answer, without surrounding white space.
        family: questions that give each other away (inverses, commuted sums, inflections of one lemma) share a family,
            and a family falls on one side of every split.
    """

    id: str
    text: str
    answer: str
    family: str


@dataclass(frozen=True)
class Split:
    """Items to search heads with, and items to confirm them on. The two sides share no family.

    Attributes:
        search: items of the search, ordered so that a smaller search is a prefix of a larger one.
        held_out: items of the confirmation, ordered likewise.
    """

    search: tuple[Item, ...]
    held_out: tuple[Item, ...]


@dataclass(frozen=True)
class Task:
    """A capability to localize, or to control with.

    Attributes:
        name: how users and files refer to the task.
        description: one line for listings.
        questions: everything that can be asked.
        shots: the solved examples before every question, in families of their own.
        template: how a question is put, with ``{text}`` in the place of ``Question.text``; the answer follows after
            one space.
        relatives: names of tasks so close to this one that they must not act as its control.
    """

    name: str
    description: str
    questions: tuple[Question, ...]
    shots: tuple[Question, ...]
    template: str
    relatives: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if "{text}" not in self.template or self.template != self.template.rstrip():
            raise UsageError(f"task '{self.name}': the template needs '{{text}}' and no white space at its end")
        ids = [question.id for question in self.questions]
        if len(set(ids)) < len(ids):
            raise UsageError(f"task '{self.name}': two questions share the id '{_first_duplicate(ids)}'")
        for question in (*self.shots, *self.questions):
            if not question.answer or question.answer != question.answer.strip() or "\n" in question.answer:
                raise UsageError(
                    f"task '{self.name}': the answer to '{question.id}' must be one line of text, stripped"
                )
        shared = {shot.family for shot in self.shots} & {question.family for question in self.questions}
        if shared:
            raise UsageError(f"task '{self.name}': family '{min(shared)}' is both in the shots and in the questions")

    @cached_property
    def prefix(self) -> str:
        """The one few-shot prefix before every question: a line for each shot; empty without shots."""
        return "".join(f"{self._ask(shot)} {shot.answer}\n" for shot in self.shots)

    def item(self, question: Question) -> Item:
        """The question as an engine is asked it."""
        return Item(self.name, question.id, self.prefix + self._ask(question), f" {question.answer}")

    def grade(self, item: Item, text: str) -> bool:
        """The task's own metric on generated text: its first line, stripped, is the answer."""
        return first_line_equals(text, item.answer)

    def related(self, other: Task) -> bool:
        """Whether the two must not control each other: the same task, or one declares the other a relative."""
        return self.name == other.name or other.name in self.relatives or self.name in other.relatives

    def split(self, seed: int, search: int | None = None, held_out: int | None = None) -> Split:
        """Divides the questions into search and held-out items, whole families at a time.

        Families are put into an order that depends on nothing but the seed, the task's name and their own names. The
        search takes questions from its front, the confirmation from its back, so neither side changes when the other
        grows. A family that a requested number cuts through stays on its side; its remaining questions go unused.

        Args:
            seed: any integer; record it.
            search: number of search items; None takes what the other side leaves, or half if that is None too.
            held_out: number of held-out items; None likewise.

        Raises:
            UsageError: if a side would be empty, or if the two sides ask for more than the task has.
        """
        for side, count in (("search", search), ("held-out", held_out)):
            if count is not None and count < 1:
                raise UsageError(f"task '{self.name}': {count} {side} items asked for; ask for at least 1")
        families = self._ordered_families(seed)
        if search is None and held_out is None:
            search = max(1, len(self.questions) // 2)
        # At least one of the two is a number now.
        front = _families_needed(families, search)
        back = _families_needed(families[::-1], held_out)
        front = len(families) - back if search is None else front
        back = len(families) - front if held_out is None else back
        if front < 1 or back < 1 or front + back > len(families):
            raise UsageError(
                f"task '{self.name}' has {len(self.questions)} questions in {len(families)} families, too few for "
                f"{_asked(search)} search and {_asked(held_out)} held-out items; ask for fewer"
            )
        return Split(self._items(families[:front], search), self._items(families[::-1][:back], held_out))

    def _ask(self, question: Question) -> str:
        return self.template.replace("{text}", question.text)

    def _items(self, families: Sequence[tuple[Question, ...]], count: int | None) -> tuple[Item, ...]:
        return tuple(self.item(question) for family in families for question in family)[:count]

    def _ordered_families(self, seed: int) -> list[tuple[Question, ...]]:
        members: dict[str, list[Question]] = {}
        for question in self.questions:
            members.setdefault(question.family, []).append(question)
        # A digest for each family, not one shuffle of all: adding a question leaves the order of the others alone.
        order = sorted(members, key=lambda family: _digest(f"{seed}|{self.name}|{family}"))
        return [tuple(sorted(members[f], key=lambda q: _digest(f"{seed}|{self.name}|{q.id}"))) for f in order]


def _families_needed(families: Sequence[tuple[Question, ...]], count: int | None) -> int:
    """How many families from the front hold ``count`` questions: 0 for None, one more than all if all hold fewer."""
    total = 0
    for needed, family in enumerate(families):
        if total >= (count or 0):
            return needed
        total += len(family)
    return len(families) + (total < (count or 0))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _first_duplicate(values: list[str]) -> str:
    return next(value for i, value in enumerate(values) if value in values[:i])


def _asked(count: int | None) -> str:
    return "any" if count is None else str(count)
