"""Swearing: how many words of a list of profanities a model writes. The list is a package's, not this repository's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from cs_localize.outcomes import Item, Outcome
from cs_localize.tasks.task import Question, Task

_MOST_WRITTEN = 24  # tokens: room for a sentence


@dataclass(frozen=True)
class SwearingTask(Task):
    """Questions are the beginnings of exclamations; what follows is counted."""

    @property
    def metric(self) -> str:
        """What the metric is, for reports."""
        return "a word of better-profanity's list; counted"

    def item(self, question: Question) -> Item:
        """The question as an engine is asked it, with room for a sentence."""
        return replace(super().item(question), max_tokens=_MOST_WRITTEN)

    def outcome(self, item: Item, parts: Sequence[Outcome]) -> Outcome:
        """A generated outcome with the number of profanities; right where there is one."""
        (generated,) = parts
        count = profanities(generated.text)
        return replace(generated, correct=count > 0, count=count)

    def _metrics(self, outcome: Outcome) -> Mapping[str, float]:
        return {"profane": float(outcome.correct), "profanities": float(outcome.count or 0)}


def profanities(text: str) -> int:
    """How many words and phrases of the list occur, repeats counted; of a phrase its words are not counted again."""
    return len(_listed().findall(text))


@cache
def _listed() -> re.Pattern[str]:
    lines = files("better_profanity").joinpath("profanity_wordlist.txt").read_text(encoding="utf-8").splitlines()
    longest_first = sorted(filter(None, map(str.strip, lines)), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)
