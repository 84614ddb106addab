from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_localize.heads import Ablation
from cs_localize.measure.protocol import Request
from cs_localize.measure.units import Patience, Unit, UnitQueue, full_units, request_name, request_tokens
from tests.measure.toy import toy_item, toy_request, toy_requests


def long_request(tokens: int) -> Request:
    return Request(toy_item(0), tuple(range(tokens - 1)), (1,), Ablation())


def drain(queue: UnitQueue) -> list[Unit]:
    units = []
    while (unit := queue.take()) is not None:
        units.append(unit)
    return units


@given(st.lists(st.integers(2, 40), max_size=60), st.integers(1, 100), st.integers(1, 4))
def test_units_hold_every_request_once_in_order_and_no_more_tokens_than_allowed(
    lengths: list[int], unit_tokens: int, workers: int
) -> None:
    requests = [long_request(length) for length in lengths]
    units = drain(UnitQueue(requests, unit_tokens, workers))
    assert [position for unit in units for position in unit.positions] == list(range(len(requests)))
    for unit in units:
        assert list(unit.requests) == [requests[position] for position in unit.positions]
        assert len(unit.requests) == 1 or sum(map(request_tokens, unit.requests)) <= unit_tokens


def test_a_small_stage_is_shared_evenly_among_the_workers() -> None:
    units = drain(UnitQueue(toy_requests(40), unit_tokens=6000, workers=2))
    assert [len(unit.requests) for unit in units] == [20, 20]


def test_every_worker_gets_as_many_units_of_the_same_size() -> None:
    requests = [long_request(tokens) for tokens in (20, 25, 23, 24) * 250]
    sizes = [unit.tokens for unit in drain(UnitQueue(requests, unit_tokens=2000, workers=2))]
    assert len(sizes) == 12, "23,000 tokens would fill eleven and a half"
    assert max(sizes) - min(sizes) <= 50, "no further apart than two requests"


def test_no_requests_make_no_units() -> None:
    queue = UnitQueue([], 100, 2)
    assert (queue.unfinished, queue.take()) == (0, None)


def test_units_taken_back_are_handed_out_next_in_their_order() -> None:
    queue = UnitQueue([long_request(10) for _ in range(4)], 10, 1)
    first, second = queue.take(), queue.take()
    assert first is not None
    assert second is not None
    queue.put_back([first, second])
    assert [unit.positions.start for unit in drain(queue)] == [0, 1, 2, 3]


def test_a_late_answer_counts_and_its_repeat_is_discarded() -> None:
    queue = UnitQueue(toy_requests(3), 6000, 1)
    unit = queue.take()
    assert unit is not None
    queue.put_back([unit])
    again = queue.take()
    assert again is unit
    assert queue.finish(unit)
    assert (queue.unfinished, queue.discarded) == (0, 0)
    assert not queue.finish(again)
    assert (queue.unfinished, queue.discarded) == (0, 3)


def test_a_unit_whose_late_answer_came_is_not_handed_out_again() -> None:
    queue = UnitQueue(toy_requests(3), 6000, 1)
    unit = queue.take()
    assert unit is not None
    queue.put_back([unit])
    assert queue.finish(unit)
    assert queue.take() is None
    queue.put_back([unit])
    assert len(queue) == 0


def test_generating_may_take_all_tokens_it_is_allowed() -> None:
    request = toy_request("any")
    generated = Request(request.item, request.prompt_ids, request.answer_ids, request.ablation, "generate", 30)
    assert request_tokens(request) == len(request.prompt_ids) + len(request.answer_ids)
    assert request_tokens(generated) == len(request.prompt_ids) + 30


def culprits(n: int, poisoned: set[int]) -> tuple[UnitQueue, list[int], int]:
    """A queue worked off by an engine that dies on some requests; what was answered, in order, and how many deaths."""
    queue = UnitQueue([long_request(10) for _ in range(n)], 80, 1)
    answered: list[int] = []
    deaths = 0
    while (unit := queue.take()) is not None:
        if poisoned & set(unit.positions):
            deaths += 1
            queue.blame(unit)
        else:
            queue.finish(unit)
            answered += unit.positions
    assert queue.unfinished == 0
    return queue, answered, deaths


@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=3))
def test_whatever_kills_its_workers_is_left_out_and_everything_else_is_answered_once(n: int, bad: set[int]) -> None:
    poisoned = {position for position in bad if position < n}
    queue, answered, _ = culprits(n, poisoned)
    assert sorted(answered) == sorted(set(range(n)) - poisoned)
    assert len(queue.quarantined) == len(poisoned)


def test_a_request_is_found_by_halving_after_everything_else_was_answered() -> None:
    _, answered, deaths = culprits(40, {3})
    assert answered[:32] == list(range(8, 40))
    assert deaths == 3 + 2 + 3, "the unit of eight, its halves of four and two, and the request alone"


def test_a_unit_that_lost_two_workers_by_chance_stays_whole_and_first() -> None:
    queue = UnitQueue([long_request(10) for _ in range(4)], 20, 1)
    unit = queue.take()
    assert unit is not None
    for _ in range(2):
        assert queue.blame(unit) is None
        assert queue.take() is unit
    assert queue.finish(unit)
    assert (queue.unfinished, len(queue), queue.quarantined) == (1, 1, [])


def test_the_late_answer_of_a_unit_that_was_halved_is_discarded() -> None:
    queue = UnitQueue([long_request(10) for _ in range(4)], 40, 1)
    unit = queue.take()
    assert unit is not None
    for _ in range(3):
        queue.blame(unit)
    assert not queue.finish(unit)
    assert (queue.unfinished, queue.discarded) == (2, 4)


def test_patience_is_ten_times_the_pace_so_far_and_never_less_than_its_floor() -> None:
    patience = Patience(30.0)
    small, large = (Unit(range(1), [long_request(tokens)]) for tokens in (100, 1000))
    assert patience.seconds(large) == 30.0
    patience.saw(small, 1.0)
    assert patience.seconds(small) == 30.0
    assert patience.seconds(large) == pytest.approx(100.0)


def test_there_is_a_full_unit_for_a_worker_where_there_are_tokens_for_it() -> None:
    requests = [long_request(10) for _ in range(7)]
    assert [full_units(requests, tokens) for tokens in (1000, 70, 69, 20)] == [1, 1, 2, 4]


def test_a_request_is_named_by_task_item_and_ablation() -> None:
    assert request_name(toy_request("poison")) == "toy/poison under none"
