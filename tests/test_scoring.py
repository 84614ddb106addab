"""Score and metric, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from scipy.stats import spearmanr

from cs_localize.heads import Ablation, Head
from cs_localize.measure.protocol import Mode, Request
from cs_localize.outcomes import Item, Outcome
from cs_localize.scoring import scoring_of
from cs_localize.tasks import get_task

ITEMS = tuple(Item("antonyms", str(number), "?", " !") for number in range(12))
HEADS = (Head(1, 2),)


@dataclass
class Falling:
    """Scores fall with the item's number and by ``loss`` under an ablation; answers are right above ``bar``."""

    loss: float = 4.0
    bar: float = -6.0

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        return Request(item, (1,), (2,), ablation, mode)

    def score(self, item: Item, ablation: Ablation) -> float:
        return -float(item.id) - (0 if ablation.empty else self.loss)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        scores = [self.score(request.item, request.ablation) for request in requests]
        return [
            Outcome(score, False, "", 2) if request.mode == "score" else Outcome(float("nan"), score > self.bar, "x", 2)
            for request, score in zip(requests, scores, strict=True)
        ]


def test_the_rank_correlation_is_over_items_with_and_without_the_named_heads() -> None:
    measurer = Falling()
    found = scoring_of({"antonyms": get_task("antonyms")}, {"antonyms": ITEMS}, {"antonyms": HEADS}, measurer)
    cells = [(item, ablation) for ablation in (Ablation(), Ablation.of(HEADS)) for item in ITEMS]
    scores = [measurer.score(*cell) for cell in cells]
    expected = spearmanr(scores, [score > measurer.bar for score in scores]).statistic
    assert found["antonyms"].correlation == pytest.approx(expected)
    assert found["antonyms"].sample == 24
    assert found["antonyms"].sequences == 1
    assert found["antonyms"].score == "log-probability of the reference answer"


def test_where_nothing_is_named_the_sample_is_the_unablated_items() -> None:
    found = scoring_of({"antonyms": get_task("antonyms")}, {"antonyms": ITEMS}, {"antonyms": ()}, Falling())
    assert found["antonyms"].sample == 12


def test_there_is_no_correlation_where_every_answer_is_right() -> None:
    measurer = Falling(bar=-100.0)
    found = scoring_of({"antonyms": get_task("antonyms")}, {"antonyms": ITEMS}, {"antonyms": HEADS}, measurer)
    assert found["antonyms"].correlation is None
