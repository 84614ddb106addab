from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from cs_localize.errors import UsageError
from cs_localize.plan import Plan, plan_lines, plan_study
from tests.plan.builders import planned, with_prompts

EASY = {"n_specific": 2, "n_universal": 2, "background": 0.01, "noise": 0.0}
SHAPE = {"layers": 12, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 256}
EASY_STUDY = {"engine__planted": {"shape": SHAPE, **EASY}}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_study(planned(**EASY_STUDY), confidence=0.6)


def test_the_sums_are_those_of_the_stages_and_of_the_tasks(plan: Plan) -> None:
    for field in ("masked", "unablated", "tokens"):
        totals = [getattr(stage.total, field) for stage in plan.stages]
        assert getattr(plan.total, field) == sum(totals)
        assert totals == [sum(getattr(cost, field) for cost in stage.tasks.values()) for stage in plan.stages]


def test_a_plan_is_written_as_json_and_read_back(plan: Plan) -> None:
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert json.loads(plan.model_dump_json())["expected"]["k"] == 2


def test_the_suggested_budget_is_the_smallest_of_the_ladder_whose_lower_bound_reaches_the_confidence(
    plan: Plan,
) -> None:
    found = plan.suggestion
    assert found is not None
    assert found.expected is not None
    assert found.total is not None
    assert found.ladder == sorted(found.ladder)
    assert found.expected.requests == found.ladder[-1]
    assert found.expected.hit_interval[0] >= 0.6
    assert found.total.masked - plan.total.masked == 2 * (found.expected.requests - 300)


def test_where_no_budget_is_enough_the_plan_says_so_and_suggests_none() -> None:
    hopeless = {"engine__planted": {"shape": SHAPE, "n_universal": 0, "background": 3.0}}
    plan = plan_study(planned(**hopeless), confidence=0.95)
    assert plan.suggestion is not None
    assert (plan.suggestion.expected, plan.suggestion.total) == (None, None)
    assert plan.suggestion.ladder[-1] == 4 * 300
    assert "no budget of 75, 150, 225, 300, 450, 600, 900, 1,200 requests a task showed it" in _text(plan)


def test_budgets_that_make_no_design_are_not_tried(tmp_path: Path) -> None:
    rounds = plan_study(planned(**EASY_STUDY, design__rounds=2, design__requests=100), confidence=0.99, repeats=1)
    assert rounds.suggestion is not None
    assert rounds.suggestion.ladder[0] == 50, "the pilot takes 24 and the masks would get 20 of 25"
    np.save(tmp_path / "masks.npy", np.random.default_rng(0).random((10, 96)) < 0.1)
    own = {"masks": str(tmp_path / "masks.npy"), "requests": 300}
    masks = plan_study(planned(**EASY_STUDY, design=own), confidence=0.99, repeats=1)
    assert masks.suggestion is not None
    assert masks.suggestion.ladder[-1] == 300, "10 masks and 40 items make 400 different requests"


def test_blocks_save_the_whole_cache_blocks_that_all_prompts_start_with() -> None:
    units = plan_study(with_prompts(planned(**EASY_STUDY), shots=150, question=9, answer=1), repeats=1).units
    assert units.shared == {"antonyms": 128, "capitals": 128}, "four blocks of 32 tokens"
    assert units.request.computed == 160
    assert units.blocks.computed == 160 - 128 * 7 / 8
    assert units.request.expected is not None
    assert units.blocks.expected is not None
    assert units.request.expected.requests == 300
    # Twelve layers of two pilot requests; the rest at equal tokens.
    assert units.blocks.expected.requests == 24 + round(276 * 160 / 48)
    assert units.tokens == 2 * 276 * 160


def test_heads_that_rounds_try_alone_cost_as_much_whatever_shares_the_masks() -> None:
    study = with_prompts(planned(**EASY_STUDY, design__rounds=3), shots=150, question=9, answer=1)
    units = plan_study(study, repeats=1).units
    # 216 masks after the pilot; 60 requests of heads alone, two items each, at 160 - 128 / 2 tokens.
    assert units.tokens == 2 * (216 * 160 + 60 * 96)
    assert units.request.expected is not None
    assert units.blocks.expected is not None
    assert units.request.expected.requests == 300
    # 552 masks at 160 - 128 * 7 / 8 tokens and 144 requests of heads alone come to the same.
    assert units.blocks.expected.requests == 720


def test_heads_that_rounds_try_alone_share_no_more_items_than_tests_leave_them() -> None:
    def tokens(by: str) -> int:
        study = planned(**EASY_STUDY, design__rounds=2, search_items=16, select={"by": by, "limit": 1})
        return plan_study(with_prompts(study, shots=150, question=9, answer=1), repeats=1).units.tokens

    # 60 requests would be 15 items for each of four heads; the tests leave 4 of 16.
    assert tokens("naming") == 2 * (216 * 160 + 60 * 160 - 60 * 128 * 14 // 15)
    assert tokens("tests") == 2 * (216 * 160 + 60 * 160 - 60 * 128 * 3 // 4)


def test_the_last_token_of_a_prompt_is_computed_under_every_mask() -> None:
    units = plan_study(with_prompts(planned(**EASY_STUDY), shots=64, question=0), repeats=1).units
    assert set(units.shared.values()) == {32}


def test_an_engine_without_a_prefix_cache_gains_nothing_from_blocks() -> None:
    study = with_prompts(planned(**EASY_STUDY), shots=150, question=9)
    units = plan_study(study, repeats=1, shares_prefixes=False).units
    assert (units.recommended, set(units.shared.values())) == ("request", {0})
    assert units.blocks.computed == units.request.computed


def test_blocks_are_recommended_where_the_shots_are_long_and_requests_where_they_are_not() -> None:
    def recommended(shots: int) -> str:
        study = with_prompts(planned(**EASY_STUDY, design__requests=60, search_items=20), shots, question=4)
        return plan_study(study, repeats=6).units.recommended

    assert recommended(1600) == "block"
    assert recommended(8) == "request"


def test_a_model_with_too_few_heads_is_planned_without_a_simulation() -> None:
    tiny = {"engine__planted": {"shape": {**SHAPE, "layers": 1, "kv_heads": 2}}, "design__density": 0.2}
    plan = plan_study(planned(**tiny), confidence=0.9)
    assert (plan.expected, plan.suggestion, plan.units.recommended) == (None, None, "request")
    assert "expected: 8 heads are too few to plant some for each task, so nothing is simulated." in _text(plan)


@pytest.mark.parametrize("options", [{"confidence": 1.0}, {"confidence": 0.0}, {"repeats": 0}, {"repeats": 10**6}])
def test_an_option_out_of_range_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"--(confidence|repeats)"):
        plan_study(planned(**EASY_STUDY), **options)  # type: ignore[arg-type]


def test_the_table_says_what_is_a_bound_how_to_get_hours_and_what_was_assumed(plan: Plan) -> None:
    text = _text(plan)
    assert re.search(r"search +552 +0 ", text)
    assert re.search(r"naming +<= 800 +<= 60 ", text)
    assert "no rate is known; give one with --rate" in text
    assert "3 nats to its most specific head" in text
    assert "(assumed, until a pilot was run)" in text
    assert "confidence 0.6: design.requests" in text


def _text(plan: Plan) -> str:
    return "\n".join(plan_lines(plan)).replace("\n  ", " ")
