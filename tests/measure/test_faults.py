"""Faults on a cluster of several nodes: the findings are those of a quiet run, or one line says what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.measure.faulty import POISONED
from tests.measure.nodes import ROOT, LocalCluster
from tests.studies import planted, repeated_keys, wait_for, write_study

pytestmark = pytest.mark.ray

TASKS = ["capitals", "plurals"]
PROGRESS = re.compile(r"[a-z: ]+: [0-9,]+(/| requests )")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """A head that only coordinates, and two nodes with one core each."""
    with LocalCluster(0, 1, 1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def quiet(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a run without any fault finds."""
    folder = tmp_path_factory.mktemp("quiet")
    done = finish(start(cluster, folder))
    assert done == (0, ""), done
    return findings(folder)


def start(
    cluster: LocalCluster,
    folder: Path,
    fault: str = "",
    delay_s: float = 0.0,
    unit_tokens: int = 120,
    unit_timeout_s: float = 600.0,
) -> subprocess.Popen[str]:
    """A study on the cluster, in a process of its own."""
    study = planted(
        tasks=TASKS,
        search_items=24,
        held_out_items=24,
        design__requests=200,
        design__pilot={"requests_a_layer": 0},
        select={"candidates": 3, "limit": 3},
        confirm={"random_draws": 1, "bootstrap": 100, "curve": 2},
        engine__unit_tokens=unit_tokens,
        engine__unit_timeout_s=unit_timeout_s,
        engine__planted__delay_s=delay_s,
    )
    module = ["cs_localize"] if not fault else ["tests.measure.faulty", fault]
    file = write_study(folder / "study.yaml", study)
    return subprocess.Popen(
        [sys.executable, "-m", *module, "run", str(file), "--out", str(folder / "out")],
        cwd=ROOT,
        env=os.environ | cluster.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(study: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and what is on stderr besides the progress of the stages."""
    try:
        _, errors = study.communicate(timeout=60)
    finally:
        study.kill()
    return study.returncode, "\n".join(line for line in errors.splitlines() if not PROGRESS.match(line))


def findings(folder: Path) -> list[Any]:
    """What a study found, without the command that found it; and the ledger has no key twice."""
    found = []
    for name in ("heads.json", "confirm.json"):
        file = json.loads((folder / "out" / name).read_text(encoding="utf-8"))
        file.pop("provenance", None)
        found.append(file)
    assert repeated_keys(folder / "out" / "ledger") == 0
    return found


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind so far."""
    path = folder / "out" / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if event["event"] == kind]


def parent(pid: int) -> int:
    """The process that started another: for a worker, the Ray of its node."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def test_a_killed_worker_changes_nothing_and_the_workers_are_spread_over_the_nodes(
    cluster: LocalCluster, quiet: list[Any], tmp_path: Path
) -> None:
    study = start(cluster, tmp_path, delay_s=0.05)
    wait_for(lambda: len(events(tmp_path, "worker_ready")) == 2)
    first, second = (event["pid"] for event in events(tmp_path, "worker_ready"))
    assert parent(first) != parent(second)
    os.kill(first, signal.SIGKILL)
    code, errors = finish(study)
    assert code == 0, errors
    assert findings(tmp_path) == quiet
    assert len(events(tmp_path, "worker_lost")) == 1


def test_a_killed_node_and_another_that_joins_change_nothing(
    cluster: LocalCluster, quiet: list[Any], tmp_path: Path
) -> None:
    study = start(cluster, tmp_path, delay_s=0.1)
    wait_for(lambda: len(events(tmp_path, "worker_ready")) == 2)
    cluster.kill(1)
    wait_for(lambda: bool(events(tmp_path, "worker_lost")))
    cluster.add(1)
    wait_for(lambda: len(events(tmp_path, "worker_ready")) == 3)
    assert study.poll() is None
    code, errors = finish(study)
    assert code == 0, errors
    assert findings(tmp_path) == quiet


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        ("wrong", 2, "cs-localize: /models/llama has no config.json; give the folder of a model"),
        ("memory", 1, "cs-localize: the planted engine failed: MemoryError: cannot allocate 64 GiB"),
    ],
)
def test_an_engine_that_does_not_load_ends_the_study_in_one_line(
    cluster: LocalCluster, tmp_path: Path, fault: str, code: int, line: str
) -> None:
    assert finish(start(cluster, tmp_path, fault)) == (code, line)
    assert not (tmp_path / "out" / "heads.json").exists()


def test_an_engine_that_hangs_is_replaced_and_changes_nothing(
    cluster: LocalCluster, quiet: list[Any], tmp_path: Path
) -> None:
    code, errors = finish(start(cluster, tmp_path, "hang", unit_timeout_s=2.0))
    assert code == 0, errors
    assert findings(tmp_path) == quiet
    # On a busy machine a worker that does its work may seem to hang as well; nothing may come of it.
    assert {event["reason"].split(":")[0] for event in events(tmp_path, "worker_lost")} == {"hung"}


def test_a_poisoned_item_is_named_everything_else_is_kept_and_a_cured_engine_ends_the_study(
    cluster: LocalCluster, quiet: list[Any], tmp_path: Path
) -> None:
    code, errors = finish(start(cluster, tmp_path, "poison", unit_tokens=40))
    name = "/".join(POISONED) + " under none"
    assert code == 1
    assert f"quarantined: {name}; it killed all of the 3 workers it was given to" in errors.splitlines()
    assert errors.splitlines()[-1].startswith(
        f"cs-localize: 1 request killed 3 workers each and could not be measured: {name}; everything else "
    )
    assert [(event["task"], event["item"]) for event in events(tmp_path, "quarantined")] == [POISONED]
    asked = sum(event["total"] for event in events(tmp_path, "stage_started"))
    assert finish(start(cluster, tmp_path)) == (0, "")
    assert findings(tmp_path) == quiet
    again = next(event for event in events(tmp_path, "stage_finished"))
    assert (again["stage"], again["served"]) == ("baseline", asked - 1)


def test_a_full_disk_ends_the_study_in_one_line_and_loses_nothing_that_was_measured(
    cluster: LocalCluster, quiet: list[Any], tmp_path: Path
) -> None:
    code, errors = finish(start(cluster, tmp_path, "full"))
    assert code == 1
    ours = [line for line in errors.splitlines() if "[ray_log_sink]" not in line]  # Ray's own log has no room either
    assert len(ours) == 1
    assert ours[0].endswith("cannot be written: File too large")
    kept = len(list((tmp_path / "out" / "ledger").glob("part-*.parquet")))
    assert kept == 4
    assert finish(start(cluster, tmp_path)) == (0, "")
    assert findings(tmp_path) == quiet
