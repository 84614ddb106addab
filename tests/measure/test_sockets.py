"""Temporary folders whose path is too long for unix sockets are refused before anything is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.measure.cluster import RaySession
from cs_localize.measure.sockets import VLLM_FOLDER, check_ray_sockets, check_vllm_sockets, vllm_sockets_fit
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.vllm import VLLMEngine

ROOT = Path(__file__).parent.parent.parent
LONG = "/" + "x" * 70


@pytest.fixture
def short() -> Iterator[str]:
    """A folder whose path is short, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder is named but the temporary one."""
    for name in (VLLM_FOLDER, "RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)


def test_the_kernel_takes_a_socket_of_vllms_in_the_longest_folder_that_fits_and_in_none_longer(short: str) -> None:
    for length, fits in ((70, True), (71, False)):
        folder = Path(short, "x" * (length - len(short) - 1))
        folder.mkdir()
        assert vllm_sockets_fit(str(folder)) == fits
        with socket.socket(socket.AF_UNIX) as one:
            try:
                one.bind(f"{folder}/{uuid4()}")
            except OSError:
                assert not fits
            else:
                assert fits


@pytest.mark.parametrize("named", [False, True])
def test_a_folder_that_is_too_long_for_vllms_sockets_is_refused_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    if named:
        monkeypatch.setenv(VLLM_FOLDER, LONG)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp" if named else LONG)
    with pytest.raises(UsageError) as refused:
        check_vllm_sockets()
    assert str(refused.value) == (
        "vLLM needs a temporary folder whose path has at most 70 bytes, for its sockets; set "
        f"{VLLM_FOLDER if named else 'TMPDIR'} to one, such as /tmp (it has 71 now: {LONG})"
    )
    monkeypatch.setenv(VLLM_FOLDER, LONG[:-1])
    check_vllm_sockets()


def test_an_engine_of_several_ranks_is_refused_before_its_model_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", LONG)
    shape = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=3, ffn=6)
    with pytest.raises(UsageError, match=r"^vLLM needs a temporary folder .* set TMPDIR"):
        VLLMEngine(EngineSpec("vllm", "unread", "x", shape, resources={"tensor_parallel": 2}))


@pytest.mark.parametrize("option", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_that_is_too_long_for_rays_sockets_is_refused_with_what_to_set_and_ray_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setenv(option, LONG)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("Ray was asked"))
    most = 107 - len(f"/ray/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store")
    with pytest.raises(UsageError) as refused:
        RaySession().__enter__()
    assert str(refused.value) == (
        f"Ray needs a temporary folder whose path has at most {most} bytes, for its sockets; set {option} to one, such "
        f"as /tmp (it has 71 now: {LONG})"
    )
    monkeypatch.setenv(option, LONG[:most])
    check_ray_sockets()


AT_THE_LIMIT = """
import os, sys
from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.measure import cluster

def fits(folder):
    os.environ["TMPDIR"] = folder
    try:
        cluster.check_ray_sockets()
    except UsageError:
        return False
    return True

folder = sys.argv[1] + "/x"
while fits(folder + "x"):
    folder += "x"
os.environ["TMPDIR"] = folder
with cluster.RaySession():
    print("up")
os.environ["TMPDIR"] = folder + "x"
cluster.check_ray_sockets = lambda: None
try:
    cluster.RaySession().__enter__()
except CsLocalizeError as error:
    print(error)
"""


@pytest.mark.ray
def test_ray_starts_in_the_longest_folder_that_is_allowed_and_in_none_longer(short: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_LIMIT, short], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    up, down = done.stdout.splitlines()
    assert up == "up"
    assert "AF_UNIX path length cannot exceed 107 bytes" in down
