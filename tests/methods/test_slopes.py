from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cs_localize.errors import UsageError
from cs_localize.heads import Ablation
from cs_localize.measure.hf import HFEngine
from cs_localize.measure.spec import EngineSpec
from cs_localize.methods import head_slopes_from_spec
from cs_localize.methods.slopes import head_slopes
from cs_localize.models.files import fingerprint
from cs_localize.models.shape import read_shape
from tests.measure.tiny_models import save_tiny_model, tiny_request

pytestmark = pytest.mark.model

REQUESTS = [tiny_request(seed, prompt=4 + seed, answer=1 + seed) for seed in range(3)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HFEngine]:
    engine = HFEngine(save_tiny_model(tmp_path_factory.mktemp(request.param), request.param))
    yield engine
    engine.close()


def test_slopes_are_what_small_changes_of_a_head_do_to_the_score(engine: HFEngine) -> None:
    slopes = head_slopes(engine, REQUESTS)
    step = 0.02
    for request, found in zip(REQUESTS, slopes, strict=True):
        scaled = [
            replace(request, ablation=Ablation.of([head], scale=1 + sign * step))
            for head in engine.shape.all_heads()
            for sign in (1, -1)
        ]
        scores = np.array([outcome.score for outcome in engine.measure(scaled)]).reshape(-1, 2)
        expected = (scores[:, 0] - scores[:, 1]) / (2 * step)
        np.testing.assert_allclose(found, expected, atol=0.01 * np.abs(expected).max())


def test_outcomes_after_slopes_are_those_before(engine: HFEngine) -> None:
    asked = [replace(request, ablation=Ablation.of([engine.shape.head(3)])) for request in REQUESTS]
    before = engine.measure(asked)
    head_slopes(engine, REQUESTS)
    assert engine.measure(asked) == before


def test_slopes_of_a_spec_are_those_of_its_engine(directory: Path) -> None:
    spec = EngineSpec("hf", str(directory), fingerprint(directory), read_shape(directory), dtype="float32")
    engine = HFEngine.from_spec(spec)
    np.testing.assert_array_equal(head_slopes_from_spec(spec, REQUESTS), head_slopes(engine, REQUESTS))
    engine.close()
    with pytest.raises(UsageError, match="engine 'planted'"):
        head_slopes_from_spec(replace(spec, name="planted"), REQUESTS)


def test_a_request_that_does_not_fit_the_model_is_a_usage_error(engine: HFEngine) -> None:
    with pytest.raises(UsageError, match="token ids outside"):
        head_slopes(engine, [replace(REQUESTS[0], answer_ids=(10**6,))])
