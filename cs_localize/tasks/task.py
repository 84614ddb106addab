"""What a capability is: questions with answers, one fixed prompt format, one split, one metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from cs_localize.errors import UsageError
from cs_localize.outcomes import Item, Outcome
from cs_localize.tasks.graders import first_line_equals, margin
from cs_localize.tasks.split import Split, split_questions

REFERENCE_SCORE = "log-probability of the reference answer"
CHOICE_SCORE = "log-probability margin of the right choice"


@dataclass(frozen=True)
class Question:
    """One question of a task, without its prompt format.

    Attributes:
        id: unique within the task and stable across versions of the question list.
        text: what the template is filled with.
        answer: the reference answer, without surrounding white space.
        family: questions that give each other away (inverses, commuted sums, inflections of one lemma) share a family,
            and a family falls on one side of every split.
        choices: of a multiple-choice question all choices, the answer among them; else empty.
    """

    id: str
    text: str
    answer: str
    family: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """A question and its answer, as a line of lm-eval's sample files holds them.

    Attributes:
        task: the task's name; of a question of a group that of its own task.
        version: the task's.
        shots: few-shot examples before the question.
        doc: the question and all that is known of it.
        target: the reference answer.
        arguments: for every sequence asked the prompt, and the text scored after it or how the answer was generated.
        responses: for every sequence the generated text, or log-probability (nats) and whether it is the likeliest.
        filtered: the same as the metric was given it.
        filter: name of what filtered it.
        metrics: values by name, the deciding one first.
    """

    task: str
    version: object
    shots: int
    doc: Mapping[str, object]
    target: object
    arguments: Sequence[tuple[object, ...]]
    responses: Sequence[object]
    filtered: Sequence[object]
    filter: str
    metrics: Mapping[str, float]


class Capability(Protocol):
    """What a study needs of a task, whether this package's or lm-evaluation-harness's."""

    @property
    def name(self) -> str:
        """How users and files refer to the task."""
        ...

    @property
    def description(self) -> str:
        """One line for listings."""
        ...

    @property
    def score(self) -> str:
        """What the continuous score is, for reports."""
        ...

    @property
    def metric(self) -> str:
        """What the metric is, for reports."""
        ...

    def related(self, other: Capability) -> bool:
        """Whether the two must not control each other."""
        ...

    def split(self, seed: int, search: int | None = None, held_out: int | None = None) -> Split:
        """Search and held-out items; see ``split_questions``."""
        ...

    def outcome(self, item: Item, parts: Sequence[Outcome]) -> Outcome:
        """The outcome that bears the task's metric.

        Args:
            item: one of the task's items.
            parts: what engines brought back: one generated or scored outcome, or one scored for every choice.
        """
        ...

    def record(self, item: Item, outcome: Outcome) -> Record:
        """A question and its graded answer as lm-eval records them.

        Args:
            item: one of the task's items.
            outcome: what ``outcome`` made of the answer.
        """
        ...


@dataclass(frozen=True)
class Task:
    """A capability to localize, or to control with.

    Attributes:
        name: how users and files refer to the task.
        description: one line for listings.
        questions: everything that can be asked; all with choices, or none.
        shots: the solved examples before every question, in families of their own.
        template: how a question is put, with ``{text}`` in the place of ``Question.text``; the answer follows after
            one space.
        relatives: names of tasks so close to this one that they must not act as its control.
        needs: module that grades its answers and is installed with the extra ``eval``; empty where none is needed.
    """

    name: str
    description: str
    questions: tuple[Question, ...]
    shots: tuple[Question, ...]
    template: str
    relatives: frozenset[str] = frozenset()
    needs: str = ""

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
        prompt = self.prefix + self._ask(question)
        item = Item(self.name, question.id, prompt, f" {question.answer}")
        if not question.choices:
            return item
        pairs = tuple((prompt, f" {choice}") for choice in question.choices)
        return replace(item, choices=pairs, gold=(question.choices.index(question.answer),), max_tokens=0)

    def grade(self, item: Item, text: str) -> bool:
        """The task's own metric on generated text: its first line, stripped, is the answer."""
        return first_line_equals(text, item.answer)

    @property
    def score(self) -> str:
        """What the continuous score is, for reports."""
        return CHOICE_SCORE if self._has_choices else REFERENCE_SCORE

    @property
    def metric(self) -> str:
        """What the metric is, for reports."""
        return "the likeliest choice is the answer" if self._has_choices else "the first line is the answer"

    def outcome(self, item: Item, parts: Sequence[Outcome]) -> Outcome:
        """A generated outcome with the task's metric; of a multiple-choice question the margin, right above zero."""
        if item.choices:
            score = margin([part.score for part in parts], item.gold)
            return Outcome(score, score > 0, "", sum(part.tokens for part in parts), parts=tuple(parts))
        (generated,) = parts
        return replace(generated, correct=self.grade(item, generated.text))

    def record(self, item: Item, outcome: Outcome) -> Record:
        """A question and its graded answer as lm-eval records them."""
        doc = {"id": item.id, "prompt": item.prompt.removeprefix(self.prefix), "answer": item.answer.strip()}
        if item.choices:
            return self._record_of_choices(item, outcome, doc)
        options: dict[str, object] = {"until": list(item.stop)}
        if item.max_tokens:
            options["max_gen_toks"] = item.max_tokens
        return Record(
            task=self.name,
            version=1,
            shots=len(self.shots),
            doc=doc,
            target=item.answer.strip(),
            arguments=[(item.prompt, options)],
            responses=[outcome.text],
            filtered=[outcome.text.partition("\n")[0].strip()],
            filter="none",
            metrics=self._metrics(outcome),
        )

    def _record_of_choices(self, item: Item, outcome: Outcome, doc: Mapping[str, object]) -> Record:
        scored = [(part.score, part.correct) for part in outcome.parts]
        return Record(
            task=self.name,
            version=1,
            shots=len(self.shots),
            doc={**doc, "choices": [choice.strip() for _, choice in item.choices]},
            target=item.gold[0],
            arguments=item.choices,
            responses=scored,
            filtered=scored,
            filter="none",
            metrics={"acc": float(outcome.correct)},
        )

    @property
    def _has_choices(self) -> bool:
        return bool(self.questions and self.questions[0].choices)

    def _metrics(self, outcome: Outcome) -> Mapping[str, float]:
        return {"exact_match": float(outcome.correct)}

    def related(self, other: Capability) -> bool:
        """Whether the two must not control each other: the same task, or one declares the other a relative."""
        theirs = other.relatives if isinstance(other, Task) else frozenset[str]()
        return self.name == other.name or other.name in self.relatives or self.name in theirs

    def split(self, seed: int, search: int | None = None, held_out: int | None = None) -> Split:
        """Divides the questions into search and held-out items, whole families at a time; see ``split_questions``.

        Raises:
            UsageError: if a side would be empty, or if the two sides ask for more than the task has.
        """
        questions = {question.id: question for question in self.questions}
        families = {question.id: question.family for question in self.questions}
        first, last = split_questions(self.name, families, seed, search, held_out)
        return Split(
            tuple(self.item(questions[name]) for name in first), tuple(self.item(questions[name]) for name in last)
        )

    def _ask(self, question: Question) -> str:
        return self.template.replace("{text}", question.text)


def _first_duplicate(values: list[str]) -> str:
    return next(value for i, value in enumerate(values) if value in values[:i])


def relatives_of(tasks: Mapping[str, Capability]) -> dict[str, frozenset[str]]:
    """By task, the others of these that must not control it."""
    return {
        name: frozenset(other for other in tasks if other != name and task.related(tasks[other]))
        for name, task in tasks.items()
    }
