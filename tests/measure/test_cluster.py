from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.measure.cluster import RaySession

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


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
