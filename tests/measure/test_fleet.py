from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cs_localize.errors import CsLocalizeError, MeasurementError, UsageError
from cs_localize.measure.cluster import RaySession
from cs_localize.measure.fleet import Fleet
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.worker import Loader
from cs_localize.outcomes import Outcome
from tests.measure.toy import (
    load_and_die,
    load_another,
    load_for_ever,
    load_nothing,
    load_toy,
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
        evidence = fleet.evidence()
    assert [answers[position].score for position in range(200)] == [toy_outcome(request).score for request in requests]
    assert len(placements) == 2
    assert {len(placement.cores) for placement in placements} == {1}
    assert placements[0].cores != placements[1].cores
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


def test_a_unit_that_kills_three_workers_is_named_and_the_others_were_answered_before() -> None:
    requests = [*toy_requests(30), toy_request("poison")]
    answered: list[int] = []
    with (
        toy_fleet(workers=2, max_restarts=5) as fleet,
        pytest.raises(MeasurementError, match="3 workers in a row died while they measured toy/poison; the last: "),
    ):
        answered.extend(position for positions, _ in fleet.map(requests) for position in positions)
    assert sorted(answered) == list(range(30))


def test_an_engine_that_does_not_load_in_time_is_reported() -> None:
    with (
        toy_fleet(workers=1, loader=load_for_ever, start_timeout_s=3) as fleet,
        pytest.raises(UsageError, match="worker 0 of 1 is still loading its engine after 3 s, and no other is up"),
    ):
        list(fleet.map(toy_requests(3)))


def test_a_fleet_that_finds_no_place_in_time_says_what_it_waits_for() -> None:
    cores = len(os.sched_getaffinity(0))
    with toy_fleet(workers=cores) as first:
        list(first.map(toy_requests(100)))
        with (
            toy_fleet(workers=1, start_timeout_s=2) as second,
            pytest.raises(
                UsageError, match=r"waiting for a place \(each asks for 1 core; free in the cluster now: 0 c"
            ),
        ):
            list(second.map(toy_requests(3)))


def test_more_workers_than_the_cluster_has_room_for_are_refused_at_once() -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(UsageError, match=rf"{cores + 1} workers with 1 core each .* room for {cores} \(machines: "):
        toy_fleet(workers=cores + 1).__enter__()


def test_a_worker_with_a_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(UsageError, match=r"1 worker with 1 core and 4096 GPU each .* room for 0"):
        toy_fleet(workers=1, gpus=4096).__enter__()


def test_fleets_follow_one_another_on_one_ray_and_leave_it_running() -> None:
    import ray

    for _ in range(2):
        with toy_fleet() as fleet:
            assert len(list(fleet.map(toy_requests(20)))) == 2
        assert ray.is_initialized()


def test_a_map_that_was_left_half_way_does_not_disturb_the_next() -> None:
    requests = toy_requests(60)
    with toy_fleet() as fleet:
        next(iter(fleet.map(requests)))
        answers: dict[int, Outcome] = {}
        for positions, outcomes in fleet.map(requests):
            answers.update(zip(positions, outcomes, strict=True))
    assert [answers[position].score for position in range(60)] == [toy_outcome(request).score for request in requests]


def test_a_driver_with_ray_address_set_uses_that_cluster_and_leaves_it_running(tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-m", "tests.measure.driver", str(tmp_path / "ledger"), str(tmp_path / "log"), "20", "0"],
        env=os.environ | {"RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "log").read_text().split()) == 20
    assert json.loads(done.stdout)[-1] == address
    assert [node["Alive"] for node in ray.nodes()] == [True]


def test_an_address_without_a_cluster_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", no_cluster)
    with pytest.raises(UsageError, match=r"no Ray cluster answers at '10.0.0.1:6379' .* unset RAY_ADDRESS") as caught:
        RaySession("10.0.0.1:6379").__enter__()
    assert "\n" not in str(caught.value)


def test_an_address_where_nothing_listens_is_refused_without_waiting_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("Ray was asked"))
    with pytest.raises(UsageError, match=r"no Ray cluster answers at '127.0.0.1:1' \(.*refused\); unset RAY_ADDRESS"):
        RaySession("127.0.0.1:1").__enter__()


def test_a_ray_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", no_cluster)
    with pytest.raises(CsLocalizeError, match=r"Ray does not start on this machine \(could not connect\)"):
        RaySession().__enter__()


def no_cluster(**options: object) -> None:
    raise ConnectionError("could not\nconnect")


def test_a_fleet_of_nobody_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one worker"):
        toy_fleet(workers=0)
