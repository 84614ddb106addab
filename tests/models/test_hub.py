from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import errors

from cs_localize.errors import UsageError
from cs_localize.models import hub
from tests.models.builders import write_hub_model, write_model

RESOLVE = """
import sys
from cs_localize.errors import UsageError
from cs_localize.models import resolve
try:
    print(resolve(sys.argv[1], revision=sys.argv[2] or None).path)
except UsageError as error:
    print(f"UsageError: {error}")
"""


def resolve_offline(cache: Path, name: str, revision: str = "") -> str:
    """What resolving prints in a process of its own: huggingface_hub reads its environment when it is imported."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    command = [sys.executable, "-c", RESOLVE, name, revision]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.removesuffix("\n")


def test_a_model_in_the_local_hub_cache_is_found_without_a_network(tmp_path: Path) -> None:
    snapshot = write_hub_model(tmp_path, "someone/small")
    assert resolve_offline(tmp_path, "someone/small") == str(snapshot)


def test_a_revision_in_the_local_hub_cache_is_found_by_its_name(tmp_path: Path) -> None:
    snapshot = write_hub_model(tmp_path, "someone/small", revision="v2")
    assert resolve_offline(tmp_path, "someone/small", "v2") == str(snapshot)
    assert "cannot be fetched" in resolve_offline(tmp_path, "someone/small")


def test_offline_a_model_that_the_cache_lacks_is_one_line(tmp_path: Path) -> None:
    message = resolve_offline(tmp_path, "someone/absent")
    assert message.startswith("UsageError: 'someone/absent' cannot be fetched: the hub cannot be reached")
    assert "\n" not in message


def test_offline_a_model_that_the_cache_holds_in_part_is_one_line(tmp_path: Path) -> None:
    (write_hub_model(tmp_path, "someone/small") / "model.safetensors").unlink()
    message = resolve_offline(tmp_path, "someone/small")
    assert message.startswith("UsageError: 'someone/small'")
    assert "\n" not in message


class Hub:
    """Stands in for ``snapshot_download``: the cache is empty, and the hub answers as told."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.asked: list[dict[str, object]] = []

    def __call__(self, name: str, **options: object) -> str:
        self.asked.append({"name": name, **options})
        if options.get("local_files_only"):
            raise errors.LocalEntryNotFoundError("not in the cache")
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def answered(error: type[errors.HfHubHTTPError], message: str = "no") -> Exception:
    return error(message, response=Mock())


def test_a_model_that_the_cache_lacks_is_fetched_with_all_that_loading_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = Hub(write_model(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
    assert hub.fetch("someone/small", "v2") == tmp_path
    assert [(asked["name"], asked["revision"]) for asked in stand_in.asked] == [("someone/small", "v2")] * 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (answered(errors.GatedRepoError), "it is gated: accept its terms"),
        (answered(errors.RepositoryNotFoundError), "the hub has no such model, or it is private"),
        (answered(errors.RevisionNotFoundError), "it has no revision 'v2'"),
        (answered(errors.HfHubHTTPError, "503 try later\nmore"), "cannot be fetched: 503 try later$"),
        (errors.OfflineModeIsEnabled("offline"), "the hub cannot be reached"),
        (errors.LocalEntryNotFoundError("no connection"), "the hub cannot be reached"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_what_keeps_a_model_from_being_fetched_is_one_line(
    monkeypatch: pytest.MonkeyPatch, answer: Exception, message: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(answer))
    with pytest.raises(UsageError, match=message) as raised:
        hub.fetch("someone/small", "v2")
    assert "\n" not in str(raised.value)


def test_a_hub_model_without_safetensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (write_model(tmp_path) / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path))
    with pytest.raises(UsageError, match="lacks safetensors weights"):
        hub.fetch("someone/small")


def test_a_name_that_no_hub_model_can_have_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a hub id"):
        hub.fetch("some..one/small")
