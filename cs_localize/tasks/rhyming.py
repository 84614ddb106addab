"""Rhyming: the last word of a couplet, right if it rhymes in the CMU Pronouncing Dictionary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cs_localize.outcomes import Item, Outcome
from cs_localize.tasks.task import Task

_WORD = re.compile(r"[A-Za-z']+")
_LINES = "; "


@dataclass(frozen=True)
class RhymingTask(Task):
    """Questions are couplets without their last word: two lines with a semicolon between.

    Many words are right, and the reference answer is one of them.
    """

    @property
    def metric(self) -> str:
        """What the metric is, for reports."""
        return "the first word rhymes (CMUdict)"

    def grade(self, item: Item, text: str) -> bool:
        """Whether the first word of the first line rhymes with the end of the couplet's first line."""
        asked = _WORD.findall(item.prompt.removeprefix(self.prefix).partition(_LINES)[0])[-1]
        answer = _WORD.search(text.partition("\n")[0])
        return answer is not None and rhymes(asked, answer[0])

    def _metrics(self, outcome: Outcome) -> Mapping[str, float]:
        return {"rhymes": float(outcome.correct)}


def rhymes(one: str, other: str) -> bool:
    """Whether two different words have a pronunciation each that agree from the last stressed vowel on.

    Pronunciations are those of CMUdict; a word that it lacks rhymes with none. Case does not matter.
    """
    return one.lower() != other.lower() and bool(_endings(one) & _endings(other))


def _endings(word: str) -> set[str]:
    import pronouncing

    return {pronouncing.rhyming_part(phones) for phones in pronouncing.phones_for_word(word)}
