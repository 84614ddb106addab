from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
import ray.util

from cs_localize.measure.handle import WorkerHandle


def test_a_worker_that_cannot_be_ended_any_more_gives_back_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = []

    def kill(actor: object, no_restart: bool) -> None:
        raise ray.exceptions.RaySystemError("the cluster is gone")

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(ray.util, "remove_placement_group", removed.append)
    worker = SimpleNamespace(ended=False, _actor="actor", _place="place")

    WorkerHandle.end(worker)  # what it needs of a handle

    assert worker.ended
    assert removed == ["place"]
