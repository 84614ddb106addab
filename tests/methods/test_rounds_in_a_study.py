"""A study with rounds, stopped between two of them and run again."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from cs_localize.folder import StudyResult
from cs_localize.measure.measurer import LedgerMeasurer
from cs_localize.measure.protocol import Request
from cs_localize.outcomes import Outcome
from cs_localize.plan.costs import stage_costs
from cs_localize.study import run_study
from tests.plan.builders import planned
from tests.studies import planted_config, repeated_keys

pytestmark = pytest.mark.ray

REQUESTS = 200
CONFIG = planted_config(
    design={"requests": REQUESTS, "rounds": 3, "density": 0.1},
    tasks=["antonyms", "capitals"],
    engine__workers=1,
    confirm={"enabled": False},
    select={"by": "tests", "limit": 2, "candidates": 6, "resamples": 2, "permutations": 2},
)
Counts = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyResult, Counts]:
    """The result of a study that was interrupted before its third round, and what the second run counted."""
    out = tmp_path_factory.mktemp("study")
    measure = LedgerMeasurer.measure

    def interrupted(self: LedgerMeasurer, requests: Sequence[Request], stage: str) -> list[Outcome]:
        if stage == "round 3":
            raise KeyboardInterrupt
        return measure(self, requests, stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LedgerMeasurer, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_study(CONFIG, out)
    result = run_study(CONFIG, out)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return result, events[-1]["counts"]


def test_what_was_measured_before_the_interruption_is_not_measured_again(
    continued: tuple[StudyResult, Counts],
) -> None:
    result, counts = continued
    for stage in ("pilot", "search", "round 2"):
        assert counts[stage]["measured"] == 0 < counts[stage]["served"]
    assert counts["round 3"]["measured"] > 0
    assert repeated_keys(result.out / "ledger") == 0


def test_a_study_spends_on_rounds_at_most_what_its_plan_says(continued: tuple[StudyResult, Counts]) -> None:
    result, counts = continued
    stages = {stage.name: stage for stage in stage_costs(planned(CONFIG))}
    # The fit sees the pilot's outcomes as well.
    assert counts["search"]["asked"] == stages["pilot"].total.masked + stages["search"].total.masked == 2 * 160
    rounds = [counts["round 2"], counts["round 3"]]
    assert 0 < sum(count["asked"] for count in rounds) <= stages["rounds"].total.masked == 2 * 40
    assert sum(count["tokens"] for count in rounds) <= stages["rounds"].total.tokens
    for task, finding in result.heads.tasks.items():
        known = ("pilot", "search", "rounds", "testing", "naming")
        assert finding.requests <= sum(stages[name].tasks[task].masked for name in known)


def test_the_heads_that_were_tried_alone_come_first_with_their_damage_and_its_interval(
    continued: tuple[StudyResult, Counts],
) -> None:
    result, _ = continued
    design = np.load(result.out / "design.npz")
    for task, finding in result.heads.tasks.items():
        masks, items = design[f"{task}.masks"], design[f"{task}.items"]
        assert len(masks) == len(items) <= REQUESTS
        alone = np.flatnonzero(masks[160:].any(axis=0))
        leading = finding.ranking[: len(alone)]
        assert {entry.head for entry in leading} == {f"L{h // 8}H{h % 8}" for h in alone}
        for entry in leading:
            assert entry.interval is not None
            assert entry.effect is not None
            low, high = entry.interval
            assert entry.effect == pytest.approx((low + high) / 2, abs=1e-5)
        assert items[160:].min() >= CONFIG.select.tests.items
        assert sum(entry.p is not None for entry in finding.ranking) == CONFIG.select.candidates


def test_the_page_tells_of_the_heads_tried_alone(continued: tuple[StudyResult, Counts]) -> None:
    page = continued[0].report.read_text(encoding="utf-8")
    assert "as it was measured with the head alone zeroed" in page
    assert "Effects of heads tried alone" in page
