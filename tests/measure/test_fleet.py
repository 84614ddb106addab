from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.measure.fleet import Fleet
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.worker import Loader
from cs_localize.outcomes import Outcome
from tests.measure.toy import (
    load_and_die,
    load_another,
    load_for_ever,
    load_nothing,
    load_toy,
    load_where_cores_are,
    toy_outcome,
    toy_request,
    toy_requests,
    toy_spec,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]
UNIT_TOKENS = 60  # ten of the toy requests


def toy_fleet(
    workers: int = 2,
    *,
    spec: EngineSpec | None = None,
    loader: Loader = load_toy,
    gpus: float = 0,
    unit_timeout_s: float = 600.0,
    max_restarts: int = 3,
    start_timeout_s: float = 60.0,
    notify: Callable[..., None] = lambda kind, **fields: None,
) -> Fleet:
    return Fleet(
        spec or toy_spec(),
        workers,
        threads=1,
        num_gpus_per_worker=gpus,
        unit_tokens=UNIT_TOKENS,
        unit_timeout_s=unit_timeout_s,
        max_restarts=max_restarts,
        start_timeout_s=start_timeout_s,
        loader=loader,
        notify=notify,
    )


def test_two_workers_on_cores_of_their_own_answer_everything_once() -> None:
    requests = toy_requests(200)
    answers: dict[int, Outcome] = {}
    with toy_fleet(spec=toy_spec(delay_s=0.05)) as fleet:
        for positions, outcomes in fleet.map(requests):
            assert not answers.keys() & set(positions)
            answers.update(zip(positions, outcomes, strict=True))
        placements = [placement for placement in fleet.placements if placement is not None]
        by_worker = fleet.evidence()
    evidence = by_worker.values()
    assert [answers[position].score for position in range(200)] == [toy_outcome(request).score for request in requests]
    assert len(placements) == 2
    assert {len(placement.cores) for placement in placements} == {1}
    assert placements[0].cores != placements[1].cores
    assert by_worker.keys() == {0, 1}
    assert sum(worker["calls"] for worker in evidence) == 20
    assert {worker["pid"] for worker in evidence} == {placement.pid for placement in placements}
    assert [worker["torch_came_first"] for worker in evidence] == [0.0, 0.0]
    assert [worker["threads"] for worker in evidence] == [1.0, 1.0]


def test_a_killed_worker_is_replaced_while_the_other_goes_on_and_every_outcome_is_as_if_nothing_had_happened() -> None:
    requests = toy_requests(1500)
    events: list[str] = []
    answered_by: list[tuple[int, list[str]]] = []
    answers: dict[int, Outcome] = {}
    with toy_fleet(
        spec=toy_spec(delay_s=0.05), notify=lambda kind, **fields: events.append(f"{kind} {fields['worker']}")
    ) as fleet:
        victim = survivor = 0
        for positions, outcomes in fleet.map(requests):
            assert not answers.keys() & set(positions)
            answers.update(zip(positions, outcomes, strict=True))
            answered_by.append((int(outcomes[0].text), list(events)))
            placements = fleet.placements
            if not victim and all(placements) and len(answered_by) > 5:
                assert placements[0] is not None
                assert placements[1] is not None
                victim, survivor = placements[0].pid, placements[1].pid
                os.kill(victim, signal.SIGKILL)
        replacement = fleet.placements[0]
    assert replacement is not None
    assert replacement.pid != victim
    after = [pid for pid, seen in answered_by if "worker_lost 0" in seen]
    assert replacement.pid in after
    meanwhile = after[: after.index(replacement.pid)]
    assert len(meanwhile) >= 3
    assert set(meanwhile) == {survivor}
    assert events.count("worker_lost 0") == 1
    assert events.count("worker_ready 0") == 2
    assert [answers[position].score for position in range(1500)] == [toy_outcome(request).score for request in requests]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", "^the canary is off$"),
        ("bug", "^the planted engine failed: ZeroDivisionError: a bug over two lines$"),
        ("short", "^the engine returned 9 outcomes for 10 requests$"),
    ],
)
def test_what_an_engine_raises_is_raised_here_in_one_line(name: str, message: str) -> None:
    requests = [*toy_requests(9), toy_request(name)]
    with toy_fleet(workers=1) as fleet, pytest.raises(MeasurementError, match=message):
        list(fleet.map(requests))


@pytest.mark.parametrize(
    ("loader", "error", "message"),
    [
        (load_nothing, UsageError, "^there is no such model$"),
        (load_another, MeasurementError, "fingerprint is another"),
        (load_and_die, MeasurementError, "2 workers died and nothing was measured in between; the last: ActorDied"),
    ],
)
def test_a_fleet_that_cannot_load_its_engine_says_why(loader: Loader, error: type[Exception], message: str) -> None:
    with toy_fleet(workers=1, loader=loader, max_restarts=1) as fleet, pytest.raises(error, match=message) as caught:
        list(fleet.map(toy_requests(3)))
    assert "\n" not in str(caught.value)


def answered_until_it_fails(fleet: Fleet, requests: list[Request], message: str) -> list[int]:
    """The positions that a map answered, in order, before it raised."""
    answered: list[int] = []
    with pytest.raises(MeasurementError, match=message) as caught:
        answered.extend(position for positions, _ in fleet.map(requests) for position in positions)
    assert "\n" not in str(caught.value)
    return sorted(answered)


@pytest.mark.parametrize(
    ("name", "tokens", "reason"), [("poison", 6, "ActorDiedError"), ("hang", UNIT_TOKENS, "hung: no answer")]
)
def test_a_request_that_kills_or_hangs_its_workers_is_quarantined_and_all_others_are_answered(
    name: str, tokens: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    culprit = toy_request(name)
    culprit = replace(culprit, prompt_ids=tuple(range(tokens - len(culprit.answer_ids))))
    requests = [*toy_requests(20), culprit, *toy_requests(3, first=20)]
    events: list[dict[str, object]] = []
    with toy_fleet(
        workers=2, unit_timeout_s=1.0, notify=lambda kind, **fields: events.append({"event": kind, **fields})
    ) as fleet:
        answered = answered_until_it_fails(
            fleet, requests, f"^1 request killed 3 workers each and could not be measured: toy/{name} under none; "
        )
        assert sorted(answered) == [position for position in range(24) if position != 20]
        assert len(list(fleet.map(toy_requests(20)))) == 2, "the fleet is fit for more"
    quarantined = [event for event in events if event["event"] == "quarantined"]
    assert [(event["task"], event["item"], event["ablation"]) for event in quarantined] == [("toy", name, "")]
    assert str(quarantined[0]["reason"]).startswith(reason)
    assert [record.message for record in caplog.records if "quarantined" in record.message] == [
        f"quarantined: toy/{name} under none; it killed all of the 3 workers it was given to"
    ]


def test_an_engine_that_dies_on_everything_ends_the_map_before_every_request_was_tried() -> None:
    requests = [toy_request("poison") for _ in range(30)]
    with toy_fleet(workers=2, max_restarts=1) as fleet:
        message = (
            "3 workers died and nothing was measured in between; the last, while it measured toy/poison under none"
        )
        assert answered_until_it_fails(fleet, requests, message) == []


def test_a_fleet_starts_no_more_workers_than_there_are_full_units_and_grows_with_the_work() -> None:
    with toy_fleet(workers=2, spec=toy_spec(delay_s=0.1)) as fleet:
        assert fleet.placements == []
        list(fleet.map(toy_requests(3)))
        assert len(fleet.placements) == 1
        answers = list(fleet.map(toy_requests(200)))
        assert len(fleet.placements) == 2
        assert sum(len(outcomes) for _, outcomes in answers) == 200


def test_the_time_that_the_caller_takes_for_a_unit_makes_no_worker_count_as_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    looked: list[float] = []
    wait = Fleet._wait

    def nothing_fetched_yet(fleet: Fleet) -> list[Any]:
        """Right after the caller came back, as with an answer that lies on another machine."""
        if away and not looked:
            looked.append(time.monotonic())
            return []
        return wait(fleet)

    monkeypatch.setattr(Fleet, "_wait", nothing_fetched_yet)
    away: list[float] = []
    with toy_fleet(
        1, spec=toy_spec(delay_s=0.1), unit_timeout_s=1.5, notify=lambda kind, **fields: events.append(kind)
    ) as fleet:
        for positions, _ in fleet.map(toy_requests(20)):
            assert len(positions) == 10
            if not away:
                time.sleep(3.0)
                away.append(time.monotonic())
    assert looked
    assert "worker_lost" not in events


def test_an_engine_that_does_not_load_in_time_is_reported() -> None:
    with (
        toy_fleet(workers=1, loader=load_for_ever, start_timeout_s=3) as fleet,
        pytest.raises(UsageError, match="worker 0 of 1 is still loading its engine after 3 s, and no other is up"),
    ):
        list(fleet.map(toy_requests(3)))


def test_a_fleet_that_finds_no_place_in_time_says_what_it_waits_for() -> None:
    cores = len(os.sched_getaffinity(0))
    with toy_fleet(workers=cores, spec=toy_spec(delay_s=0.1)) as first:
        list(first.map(toy_requests(200)))
        assert len(first.placements) == cores
        with (
            toy_fleet(workers=1, start_timeout_s=2) as second,
            pytest.raises(
                UsageError, match=r"waiting for a place \(each asks for 1 core; free in the cluster now: 0 c"
            ),
        ):
            list(second.map(toy_requests(3)))


def test_more_workers_than_the_cluster_has_room_for_are_not_asked_for_and_said_to_be_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cores = len(os.sched_getaffinity(0))
    with toy_fleet(workers=cores + 1) as fleet:
        assert sum(len(outcomes) for _, outcomes in fleet.map(toy_requests(100))) == 100
        assert len(fleet.placements) <= cores
    assert [record.message for record in caplog.records] == [
        f"{cores + 1} workers were asked for and the cluster has room for {cores}"
    ]


def test_workers_that_find_no_cores_end_a_study_only_where_no_other_is_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = partial(load_where_cores_are, tmp_path)
    events: list[tuple[str, int]] = []

    def notify(kind: str, **fields: Any) -> None:  # noqa: ANN401  # fields of any kind
        events.append((kind, fields["worker"]))

    with toy_fleet(loader=loader, spec=toy_spec(delay_s=0.05), notify=notify) as fleet:
        for _ in fleet.map(toy_requests(10_000)):
            (tmp_path / "waited").touch()
            if any(kind == "worker_ended" for kind, _ in events):
                break
        assert sum(len(outcomes) for _, outcomes in fleet.map(toy_requests(30))) == 30
    (up,) = [worker for kind, worker in events if kind == "worker_ready"]
    assert ("worker_ended", 1 - up) in events
    told = f"worker {1 - up} was not started (a worker asks for 1 cores, but others use them); the others go on"
    assert caplog.messages[0] == told
    with toy_fleet(loader=loader) as fleet, pytest.raises(UsageError, match=r"^a worker asks for 1 cores, but others"):
        list(fleet.map(toy_requests(1)))


def test_a_worker_with_a_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(UsageError, match=r"asks for 1 core and 4096 GPU, which no machine .* has \(machines: "):
        toy_fleet(workers=1, gpus=4096).__enter__()


def test_fleets_follow_one_another_on_one_ray_and_leave_it_running() -> None:
    import ray

    for _ in range(2):
        with toy_fleet() as fleet:
            assert len(list(fleet.map(toy_requests(20)))) == 2
        assert ray.is_initialized()


def test_two_fleets_side_by_side_share_the_places_and_the_first_gives_back_what_it_does_not_use() -> None:
    cores = len(os.sched_getaffinity(0))
    requests = toy_requests(200)
    events: list[str] = []

    def answers(fleet: Fleet) -> list[int]:
        return sorted(position for positions, _ in fleet.map(requests) for position in positions)

    slow = toy_spec(delay_s=0.1)
    first = toy_fleet(workers=cores, spec=slow, notify=lambda kind, **fields: events.append(kind))
    second = toy_fleet(workers=cores, spec=slow)
    with first, second, ThreadPoolExecutor(1) as other:
        assert answers(first) == list(range(200))
        held = len(first.placements)
        waiting = other.submit(answers, second)
        while not waiting.done():  # as a study goes on, stage after stage
            assert len(list(first.map(toy_requests(1)))) == 1
            time.sleep(0.1)
        assert waiting.result() == list(range(200))
        assert (held, len(first.placements)) == (cores, 1)
        assert len(second.placements) == cores - 1
    assert events.count("worker_ended") == cores


def test_a_map_that_was_left_half_way_does_not_disturb_the_next() -> None:
    requests = toy_requests(60)
    with toy_fleet() as fleet:
        next(iter(fleet.map(requests)))
        answers: dict[int, Outcome] = {}
        for positions, outcomes in fleet.map(requests):
            answers.update(zip(positions, outcomes, strict=True))
    assert [answers[position].score for position in range(60)] == [toy_outcome(request).score for request in requests]


def test_a_fleet_of_nobody_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one worker"):
        toy_fleet(workers=0)
