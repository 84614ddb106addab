from __future__ import annotations

from pathlib import Path

import pytest

from cs_localize.models import LocalModel, resolve


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new home for models, so that a test neither finds nor leaves any in the user's own."""
    home = tmp_path / "home"
    monkeypatch.setenv("CS_LOCALIZE_HOME", str(home))
    return home.resolve()


@pytest.fixture(scope="session")
def smollm2() -> LocalModel:
    """The small real model, from the user's own home: fetched and converted once for each machine."""
    return resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session", params=["tiny-qwen2", "tiny-qwen3"])
def tiny_model(request: pytest.FixtureRequest) -> LocalModel:
    """Each tiny model, from the user's own home: trained once for each machine."""
    return resolve(request.param)
