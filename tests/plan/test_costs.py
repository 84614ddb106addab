from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cs_localize.measure.protocol import Mode, Request
from cs_localize.outcomes import Item
from cs_localize.plan import Planned, Rate
from cs_localize.plan.costs import stage_costs
from cs_localize.study import run_study
from tests.plan.builders import planned, planned_config, with_prompts

SEARCHING = ("pilot", "search", "testing", "naming")
REPEATING = ("scoring",)
"""Stages that ask again what others have measured."""


def costs(study: Planned, rate: Rate | None = None) -> dict[str, tuple[int, int]]:
    return {stage.name: (stage.total.masked, stage.total.unablated) for stage in stage_costs(study, rate)}


@pytest.mark.ray
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "controls": ["counting"],
            "confirm__curve_on": "target",
            "confirm__random_on": "target",
            "select__limit": 1,
            "select__by": "naming",
        },
    ],
    ids=["all tasks", "target alone"],
)
def test_the_planned_requests_are_what_a_study_spends_exactly_or_at_most(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    config = planned_config(**changes)
    stages = {stage.name: stage for stage in stage_costs(planned(config))}

    result = run_study(config, tmp_path)

    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    counts = events[-1]["counts"]
    exact = {name: stage.total.masked + stage.total.unablated for name, stage in stages.items() if not stage.at_most}
    assert exact == {name: counts[name]["measured"] for name in exact}
    for name in exact:
        assert stages[name].total.tokens == pytest.approx(counts[name]["measured_tokens"], rel=0.01)
    counts["confirmation"] = {field: counts["confirm"][field] + counts["noise"][field] for field in ("asked", "tokens")}
    for name in stages.keys() - exact.keys():
        total = stages[name].total
        assert 0 < counts[name]["measured" if name in REPEATING else "asked"] <= total.masked + total.unablated
        assert counts[name]["measured_tokens" if name in REPEATING else "tokens"] <= total.tokens
    for task, finding in result.heads.tasks.items():
        assert finding.requests <= sum(stages[name].tasks[task].masked for name in SEARCHING if name in stages)


def test_what_is_switched_off_costs_nothing() -> None:
    whole = ["baseline", "pilot", "search", "testing", "naming", "scoring", "confirmation", "interactions"]
    assert list(costs(planned(select__by="tests"))) == whole
    part = {"select__by": "naming", "confirm__enabled": False, "design__pilot": {"requests_a_layer": 0}}
    assert list(costs(planned(**part))) == ["baseline", "search", "naming", "scoring"]


def test_tokens_are_those_of_the_items_and_generated_answers_count_at_their_longest() -> None:
    stages = {stage.name: stage.total for stage in stage_costs(with_prompts(planned(), shots=20, question=9, answer=3))}
    assert stages["search"].tokens == 32 * stages["search"].masked
    naming = stages["naming"]
    assert naming.tokens == (20 + 9 + 8) * (naming.masked + naming.unablated)


def test_a_naming_that_cannot_afford_one_try_asks_nothing_under_a_mask() -> None:
    assert costs(planned(select__requests=50))["naming"] == (0, 60)


@pytest.mark.parametrize(("unit", "amount"), [("requests", 552), ("tokens", 552 * 32)])
def test_hours_are_the_amount_at_the_rate_of_its_kind(unit: str, amount: int) -> None:
    rate = Rate.model_validate({"unit": unit, "scored": 2.0, "generated": 1.0, "source": "as given"})
    stages = {stage.name: stage for stage in stage_costs(with_prompts(planned(), 20, 9, 3), rate)}
    assert stages["search"].hours == pytest.approx(amount / 2 / 3600)
    naming = stages["naming"].total
    assert stages["naming"].hours == pytest.approx(
        (naming.masked + naming.unablated if unit == "requests" else naming.tokens) / 3600
    )
    assert all(stage.hours is None for stage in stage_costs(planned()))


def test_a_multiple_choice_question_is_a_request_for_every_choice_and_scored_but_once() -> None:
    study = planned(design__rounds=2)
    choices = (((1, 2, 3), (4,)), ((1, 2, 3), (5, 6)))

    def request(item: Item, mode: Mode) -> Request:
        return replace(study.request(item, "score"), choices=choices)

    search = {task: [replace(item, max_tokens=0) for item in items] for task, items in study.search.items()}
    plain, found = costs(study), costs(replace(study, request=request, search=search))
    for name in ("baseline", "search", "rounds", "naming"):
        assert found[name] == tuple(2 * count for count in plain[name])
    stages = {stage.name: stage.total for stage in stage_costs(replace(study, request=request, search=search))}
    assert stages["search"].tokens == 9 * plain["search"][0]
    assert found["scoring"] == (0, 0), "its metric is read from what the search has scored"


def test_rounds_cost_what_the_items_cost_that_tests_do_not_keep_to_themselves() -> None:
    def rounds(**changes: object) -> tuple[int, int]:
        study = planned(design__rounds=2, select__tests={"items": 5, "control_items": 7}, **changes)
        plain = with_prompts(study, shots=20, question=9, answer=3)
        kept = [item for items in study.search.values() for item in items[:7]]

        def request(item: Item, mode: Mode) -> Request:
            sent = plain.request(item, mode)
            return replace(sent, choices=((sent.prompt_ids, (4,)),) * 5) if item in kept else sent

        (stage,) = [stage for stage in stage_costs(replace(study, request=request)) if stage.name == "rounds"]
        return stage.total.masked, stage.total.tokens

    assert rounds(select__by="tests") == (2 * 60, 2 * 60 * 32)
    assert rounds(select__by="naming") == (2 * 300, 2 * 60 * 5 * 30)


def test_answers_of_the_models_own_are_generated_once_for_what_lm_eval_has_generated() -> None:
    study = planned(lm_eval={"reference": "self"})
    assert costs(study)["own answers"] == (0, 0)
    search = {
        task: [replace(item, boundary="lm-eval", max_tokens=4) for item in items]
        for task, items in study.search.items()
    }
    stages = {stage.name: stage for stage in stage_costs(replace(study, search=search))}
    assert next(iter(stages)) == "own answers"
    assert stages["own answers"].total.unablated == 80
    assert stages["baseline"].at_most, "what is answered wrongly is left out"
