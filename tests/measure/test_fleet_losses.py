"""What a fleet makes of the loss of workers, with workers that are no processes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from ray.exceptions import RayTaskError

from cs_localize.errors import LedgerError, MeasurementError
from cs_localize.measure.cluster import RaySession
from cs_localize.measure.crew import Crew
from cs_localize.measure.fleet import Fleet
from cs_localize.measure.units import UnitQueue
from cs_localize.measure.worker import CoresTaken
from tests.measure.toy import toy_requests, toy_spec


class Crowd:
    """Workers that a fleet believes to have hired."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: int, notify: Callable[..., None]) -> None:
        self.left = False
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(RaySession, "__exit__", self._leave)
        self.fleet = Fleet(toy_spec(), workers, 1, notify=notify)
        self.queue = UnitQueue(toy_requests(60), 60, workers)
        self.workers = [self._worker(number) for number in range(workers)]
        self.crew: Crew = self.fleet._crew
        self.crew._workers.update(dict(enumerate(self.workers)))

    def lose(self, *numbers: int) -> None:
        for number in numbers:
            self.fleet._lose(self.workers[number], "the node died", self.queue)

    def refuse(self, number: int, reason: str) -> None:
        """Has a worker come back without cores, as Ray tells it."""
        error = RayTaskError("load", "", CoresTaken(reason), ip="127.0.0.1")
        self._monkeypatch.setattr("ray.get", Mock(side_effect=error))
        self.workers[number].loading = reference = Mock()
        assert self.fleet._receive(reference, self.queue) is None

    def hire(self, number: int) -> None:
        self.workers[number] = self.crew._workers[number] = self._worker(number)

    def _worker(self, number: int) -> SimpleNamespace:
        worker = SimpleNamespace(number=number, units=[], placement=object(), loading=None, ended=False)
        worker.end = lambda: setattr(worker, "ended", True)
        return worker

    def _leave(self, *_: object) -> None:
        self.left = True


@pytest.mark.parametrize("workers", [1, 2, 4, 16])
def test_losing_all_workers_of_a_node_at_once_does_not_end_the_run(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Crowd(monkeypatch, workers, lambda kind, **fields: None)
    crowd.lose(*range(workers))
    assert all(worker.ended for worker in crowd.workers)


def test_three_deaths_in_a_row_for_each_worker_are_borne_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(monkeypatch, 4, lambda kind, **fields: None)
    for _ in range(3):
        crowd.lose(*range(4))
        for number in range(4):
            crowd.hire(number)
    with pytest.raises(MeasurementError, match="13 workers died and nothing was measured in between; the last: the"):
        crowd.lose(0)


def test_all_workers_are_ended_and_ray_is_left_though_no_end_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(kind: str, **fields: object) -> None:
        raise LedgerError("the disk is full")

    crowd = Crowd(monkeypatch, 3, full)
    with pytest.raises(LedgerError, match="the disk is full"):
        crowd.fleet.close()
    assert all(worker.ended for worker in crowd.workers)
    assert crowd.left


def test_cores_that_are_missing_are_told_once_and_again_when_others_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[str] = []
    crowd = Crowd(monkeypatch, 2, lambda kind, **fields: events.append(kind))
    for missing in ("one core is", "one core is", "two cores are", "one core is"):
        crowd.refuse(1, f"{missing} missing")
        crowd.hire(1)
    assert caplog.messages == [
        "worker 1 was not started (one core is missing); the others go on",
        "worker 1 was not started (two cores are missing); the others go on",
    ]
    assert events == ["worker_ended"] * 4
