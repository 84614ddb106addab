from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cs_localize.heads import Ablation
from cs_localize.measure.protocol import Request
from cs_localize.measure.units import Unit, UnitQueue, request_tokens
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


def test_a_unit_names_three_of_its_items_and_how_many_more() -> None:
    unit = drain(UnitQueue(toy_requests(8), 6000, 1))[0]
    assert unit.items == "toy/0, toy/1, toy/2 and 1 more"
