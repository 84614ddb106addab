from __future__ import annotations

from collections.abc import Mapping, Sequence

from cs_localize.config import SelectConfig
from cs_localize.heads import Ablation, Head
from cs_localize.measure.protocol import Mode, Request
from cs_localize.naming import Naming, name_heads, start_naming
from cs_localize.outcomes import Item, Outcome

ITEMS = {task: [Item(task, str(i), f"{task} {i} :", " x") for i in range(12)] for task in ("a", "b", "c")}
STRONG, WEAK, BREAKER, NOTHING = Head(3, 0), Head(3, 1), Head(0, 0), Head(2, 2)
SELECT = SelectConfig(candidates=4, items=12, control_items=12, limit=3)


class World:
    """Answers from a table of damages: by task and head, shares of the accuracy that add up."""

    def __init__(self, damage: Mapping[tuple[str, Head], float], able: Sequence[str] = ("a", "b", "c")) -> None:
        self._damage = damage
        self._able = able
        self.asked: list[Request] = []

    def request(self, item: Item, ablation: Ablation, mode: Mode = "generate") -> Request:
        return Request(item, (1, 2), (3,), ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        self.asked += requests
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Outcome:
        lost = sum(self._damage.get((request.item.task, head), 0.0) for head, _ in request.ablation.heads)
        ease = 1 + int(request.item.id)  # the twelve items of a task fall one after the other
        return Outcome(float("nan"), request.item.task in self._able and ease > 12 * lost, "", 4)


def named(world: World, candidates: Sequence[Head], select: SelectConfig = SELECT) -> Naming:
    naming = start_naming("a", candidates, ITEMS, ["b", "c"], select)
    name_heads([naming], select, world)
    return naming


def test_the_fewest_heads_that_take_the_accuracy_away_are_named() -> None:
    naming = named(World({("a", STRONG): 1.0, ("a", WEAK): 0.5}), [STRONG, WEAK])

    assert naming.kept == [STRONG]
    assert naming.curve == [1.0, 0.0]


def test_heads_are_added_until_the_accuracy_is_gone() -> None:
    naming = named(World({("a", STRONG): 0.5, ("a", WEAK): 0.5}), [STRONG, WEAK, NOTHING])

    assert naming.kept == [STRONG, WEAK]


def test_a_head_that_takes_the_controls_down_as_well_is_passed_over() -> None:
    damage = {("a", STRONG): 0.5, **{(task, BREAKER): 0.5 for task in "abc"}, ("a", WEAK): 0.5}
    naming = named(World(damage), [STRONG, BREAKER, WEAK])

    assert naming.kept == [STRONG, WEAK]
    assert naming.passed_over == [BREAKER]
    assert "L0H0 tried and passed over" in naming.reason(SELECT)


def test_nothing_is_named_where_no_candidate_does_damage() -> None:
    naming = named(World({}), [STRONG, WEAK])

    assert naming.kept == []
    assert naming.reason(SELECT).startswith("none of the heads tried (2)")


def test_no_more_heads_are_named_than_the_limit_and_the_reason_says_so() -> None:
    heads = [Head(3, h) for h in range(4)]
    naming = named(World({("a", head): 0.25 for head in heads}), heads)

    assert naming.kept == heads[:3]
    assert "select.limit allows no more than 3" in naming.reason(SELECT)


def test_the_requests_counted_are_the_requests_asked() -> None:
    world = World({("a", STRONG): 0.5, ("a", WEAK): 0.5})
    naming = named(world, [STRONG, WEAK, NOTHING])

    assert naming.requests == 2 * (12 + 12)
    assert naming.baseline_requests == 12
    assert len(world.asked) == naming.requests + 12 + 12
    assert naming.tokens == 4 * (naming.requests + naming.baseline_requests)


def test_a_candidate_that_does_the_task_no_damage_costs_no_request_on_the_controls() -> None:
    naming = named(World({}), [STRONG, WEAK])

    assert list(naming.idle) == [STRONG, WEAK]
    assert naming.requests == 2 * 12


def test_a_backup_head_is_tried_again_once_the_head_it_stands_in_for_is_gone() -> None:
    class Backup(World):
        def _answer(self, request: Request) -> Outcome:
            gone = {head for head, _ in request.ablation.heads}
            lost = 0.5 * (STRONG in gone) + 0.5 * ({STRONG, WEAK} <= gone)
            return Outcome(float("nan"), request.item.task != "a" or 1 + int(request.item.id) > 12 * lost, "", 4)

    naming = named(Backup({}), [WEAK, NOTHING, STRONG])

    assert naming.kept == [STRONG, WEAK]
    assert list(naming.idle) == [NOTHING]


def test_the_naming_stops_before_it_would_spend_more_than_its_budget() -> None:
    heads = [Head(3, h) for h in range(4)]
    select = SELECT.model_copy(update={"requests": 60})
    naming = named(World({("a", head): 0.25 for head in heads}), heads, select)

    assert naming.kept == heads[:2]
    assert naming.requests == 48


def test_a_task_without_controls_is_named_on_its_own_damage() -> None:
    naming = start_naming("a", [STRONG], ITEMS, [], SELECT)
    name_heads([naming], SELECT, World({("a", STRONG): 1.0}))

    assert naming.kept == [STRONG]


def test_a_task_the_model_cannot_do_has_nothing_to_name_and_costs_no_masked_request() -> None:
    naming = named(World({("a", STRONG): 1.0}, able=("b", "c")), [STRONG, WEAK])

    assert naming.kept == []
    assert naming.requests == 0
    assert "gets none of 12 search items right" in naming.reason(SELECT)


def test_no_more_candidates_are_tried_than_the_study_says() -> None:
    heads = [Head(2, h) for h in range(6)]
    naming = named(World({}), heads)

    assert list(naming.idle) == heads[:4]
