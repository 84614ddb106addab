"""A task or group of lm-eval as a capability of a study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from cs_localize.config import LmEvalConfig
from cs_localize.errors import UsageError, one_line
from cs_localize.outcomes import Item, Outcome
from cs_localize.tasks.graders import margin
from cs_localize.tasks.harness.code import CodeLeaf
from cs_localize.tasks.harness.leaf import Chat, Leaf, Unaskable
from cs_localize.tasks.harness.library import load_leaves
from cs_localize.tasks.split import Split, split_questions
from cs_localize.tasks.task import CHOICE_SCORE, REFERENCE_SCORE, Capability, Record

_SCORES = {
    "multiple_choice": CHOICE_SCORE,
    "loglikelihood": REFERENCE_SCORE,
    "generate_until": REFERENCE_SCORE,
}


class HarnessTask:
    """One lm-eval task, or several of a group or tag, whose questions are asked together.

    A question's id is the number of its document in the task's evaluation split, after the name of its task where
    there are several. Questions that read alike share a family.

    Args:
        name: the task's, group's or tag's name.
        leaves: its tasks.

    Attributes:
        name: how users and files refer to the task.
    """

    def __init__(self, name: str, leaves: Sequence[Leaf]) -> None:
        self.name = name
        self._leaves = {leaf.name: leaf for leaf in leaves}

    @property
    def members(self) -> tuple[str, ...]:
        """Names of its tasks."""
        return tuple(self._leaves)

    @property
    def description(self) -> str:
        """One line for listings."""
        kinds = ", ".join(sorted({leaf.kind for leaf in self._leaves.values()}))
        several = f"{len(self._leaves)} tasks" if len(self._leaves) > 1 else "a task"
        return f"{several} of lm-evaluation-harness, {kinds}"

    @property
    def score(self) -> str:
        """What the continuous score is, for reports."""
        return " or ".join(sorted({_SCORES[leaf.kind] for leaf in self._leaves.values()}))

    @property
    def metric(self) -> str:
        """What the metric is, for reports: lm-eval's name for it, with its filter."""
        return " or ".join(sorted({leaf.metric for leaf in self._leaves.values()}))

    def related(self, other: Capability) -> bool:
        """Whether the two must not control each other: the same task, or both have questions of one source."""
        if not isinstance(other, HarnessTask):
            return self.name == other.name
        return bool(self._sources & other._sources)

    def split(self, seed: int, search: int | None = None, held_out: int | None = None) -> Split:
        """Search and held-out items, drawn from all tasks alike; see ``split_questions``.

        Few-shot examples are on neither side. Prompts are made for the drawn questions alone.

        Raises:
            UsageError: if a side would be empty, the two sides ask for more than there is, or the task's author put
                questions in a way that fails.
        """
        first, last = split_questions(self.name, self._families, seed, search, held_out)
        left_out: dict[str, str] = {}
        return Split(self._items(first, left_out), self._items(last, left_out), left_out)

    def outcome(self, item: Item, parts: Sequence[Outcome]) -> Outcome:
        """The outcome that bears the metric; of a multiple-choice question the score is the margin."""
        leaf, number = self._document(item.id)
        correct = leaf.right(number, parts)
        if item.choices:
            score = margin([part.score for part in parts], item.gold)
            return Outcome(score, correct, "", sum(part.tokens for part in parts), parts=tuple(parts))
        return replace(parts[0], correct=correct, parts=() if item.max_tokens else tuple(parts))

    def record(self, item: Item, outcome: Outcome) -> Record:
        """A question and its graded answer as lm-eval records them."""
        leaf, number = self._document(item.id)
        return leaf.record(item, number, outcome)

    def unjudged(self, answers: Sequence[tuple[Item, Sequence[Outcome]]]) -> list[str]:
        """The programs among generated answers, each once, without those that have run; none for most tasks."""
        found: list[str] = []
        for leaf in self._leaves.values():
            if isinstance(leaf, CodeLeaf):
                found += leaf.unjudged((int(item.id), parts) for item, parts in answers)
        return found

    def judge(self, programs: Sequence[str]) -> Iterator[None]:
        """Runs programs of ``unjudged`` side by side, so that ``outcome`` finds their verdicts; yields after each.

        Raises:
            CsLocalizeError: if the sandbox cannot be had.
        """
        for leaf in self._leaves.values():
            if isinstance(leaf, CodeLeaf):
                yield from leaf.judge(programs)

    @cached_property
    def _families(self) -> dict[str, str]:
        return {
            str(number) if len(self._leaves) == 1 else f"{leaf.name}/{number}": text
            for leaf in self._leaves.values()
            for number, text in leaf.texts.items()
        }

    @cached_property
    def _sources(self) -> frozenset[str]:
        return frozenset(leaf.source for leaf in self._leaves.values())

    def _items(self, questions: Sequence[str], left_out: dict[str, str]) -> tuple[Item, ...]:
        items = []
        for question in questions:
            leaf, number = self._document(question)
            try:
                items.append(leaf.item(self.name, question, number))
            except Unaskable as reason:
                left_out[question] = str(reason)
            except UsageError:
                raise
            except Exception as error:  # prompts are templates and functions of the task's author
                raise UsageError(
                    f"task '{leaf.name}': document {number} cannot be put as a question: {type(error).__name__}: "
                    f"{one_line(error, 200)}"
                ) from None
        return tuple(items)

    def _document(self, question: str) -> tuple[Leaf, int]:
        leaf, _, number = question.rpartition("/")
        return self._leaves[leaf or next(iter(self._leaves))], int(number)


def harness_task(name: str, options: LmEvalConfig, chat: Chat | None = None) -> HarnessTask:
    """Loads a task, group or tag of lm-eval.

    Args:
        name: as lm-eval knows it.
        options: how it is asked and graded; what they say of a group holds for each of its tasks.
        chat: the model's chat template; None for plain text.

    Raises:
        UsageError: if it cannot be loaded or asked, or does not offer the metric.
    """
    if options.chat_template and chat is None:
        raise UsageError(f"task '{name}' is to be put by a chat template, and no model is known here that has one")
    loaded = load_leaves(name, options.include_path, options.allow_code_execution, options.grades)
    leaves = [
        (CodeLeaf if task.config.unsafe_code else Leaf)(
            leaf,
            task,
            options.metric.get(leaf, options.metric.get(name)),
            options.num_fewshot.get(leaf, options.num_fewshot.get(name)),
            options.system_instruction,
            chat,
            options.fewshot_as_multiturn,
        )
        for leaf, task in loaded.items()
    ]
    return HarnessTask(name, leaves)
