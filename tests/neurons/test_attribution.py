from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.heads import Ablation, Head, Neuron
from cs_localize.measure.hf import HFEngine
from cs_localize.neurons.attribution import Attribution, attribute
from tests.measure.tiny_models import EOS, NEWLINE, save_tiny_model, tiny_request
from tests.neurons import naive

pytestmark = pytest.mark.model


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HFEngine]:
    engine = HFEngine(save_tiny_model(tmp_path_factory.mktemp(request.param), request.param))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HFEngine]:
    engine = HFEngine(save_tiny_model(tmp_path_factory.mktemp("llama")))
    yield engine
    engine.close()


def assert_close(scores: np.ndarray, expected: torch.Tensor, share: float) -> None:
    """Equal to a share of the largest attribution of the model."""
    scale = float(expected.abs().max())
    assert scale > 1e-6
    np.testing.assert_allclose(scores, expected.numpy(), rtol=0.0, atol=share * scale)


@pytest.mark.parametrize("target", ["probability", "log_probability"])
def test_attribution_from_the_cache_equals_full_recomputation(engine: HFEngine, target: str) -> None:
    requests = [tiny_request(seed, prompt=4 + seed, answer=1 + seed) for seed in range(3)]
    found = attribute(engine, requests, steps=4, target=target)
    for scores, request in zip(found.scores, requests, strict=True):
        assert_close(scores, naive.attribution(engine, request, 4, log=target == "log_probability"), 1e-4)


def test_attribution_equals_finite_differences_to_one_percent(engine: HFEngine) -> None:
    request, steps, layer, step_size = tiny_request(3, answer=1), 3, 1, 2e-2
    position = len(request.prompt_ids) - 1
    hidden = naive.hidden_vector(engine, request, layer, position)
    expected = torch.zeros(engine.shape.ffn)
    with torch.no_grad():
        for neuron in range(engine.shape.ffn):
            nudge = torch.zeros_like(hidden)
            nudge[neuron] = step_size
            for k in range(steps + 1):
                up, down = (
                    naive.log_probability(engine, request, layer, position, hidden * (k / steps) + sign * nudge)
                    for sign in (1, -1)
                )
                expected[neuron] += hidden[neuron] * (up - down) / (2 * step_size) / (steps + 1)
    found = attribute(engine, [request], steps=steps, target="log_probability")
    assert_close(found.scores[0, layer], expected, 0.01)


def test_attribution_sums_approach_the_gain_of_the_whole_layer_as_the_steps_grow(engine: HFEngine) -> None:
    requests = [tiny_request(seed) for seed in range(3)]
    errors = []
    for steps in (10, 40, 160):
        found = attribute(engine, requests, steps=steps)
        errors.append(float(np.abs(found.sums - found.gains).max() / np.abs(found.gains).max()))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.02
    assert found.completeness > 0.999


def test_gain_is_the_probability_with_the_hidden_vector_minus_that_without(llama: HFEngine) -> None:
    request = tiny_request(0, answer=1)
    position = len(request.prompt_ids) - 1
    found = attribute(llama, [request])
    for layer in range(llama.shape.layers):
        hidden = naive.hidden_vector(llama, request, layer, position)
        with torch.no_grad():
            full, nothing = (
                float(naive.log_probability(llama, request, layer, position, vector).exp())
                for vector in (hidden, torch.zeros_like(hidden))
            )
        assert found.gains[layer] == pytest.approx(full - nothing, abs=1e-6)


def test_heads_zeroed_during_attribution_are_zeroed_for_every_variant(engine: HFEngine) -> None:
    ablation = Ablation.of([Head(0, 1), Head(1, 3), Head(2, 0), Head(2, 1)])
    request = tiny_request(1, ablation)
    found = attribute(engine, [request, replace(request, ablation=Ablation())], steps=3)
    assert_close(found.scores[0], naive.attribution(engine, request, 3), 1e-4)
    assert not np.allclose(found.scores[0], found.scores[1], rtol=0.1)


@pytest.mark.parametrize("rows", [1, 9, 10000])
def test_number_of_rows_at_once_changes_nothing(llama: HFEngine, rows: int) -> None:
    requests = [tiny_request(seed) for seed in range(2)]
    found, expected = attribute(llama, requests, steps=4, rows=rows), attribute(llama, requests, steps=4, rows=5)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-6)
    assert len(found.sums) == len(found.gains) == 2 * 2 * llama.shape.layers
    np.testing.assert_allclose(found.sums, expected.sums, atol=1e-6)


def test_score_of_an_item_does_not_depend_on_the_items_beside_it(llama: HFEngine) -> None:
    requests = [tiny_request(seed, prompt=4 + 2 * seed) for seed in range(3)]
    together = attribute(llama, requests, steps=4).scores
    alone = np.concatenate([attribute(llama, [request], steps=4).scores for request in requests])
    np.testing.assert_array_equal(together, alone)


def test_own_answer_is_the_greedy_one_under_the_ablation_up_to_its_end(llama: HFEngine) -> None:
    requests = [replace(tiny_request(seed, Ablation.of([Head(1, 1)])), max_tokens=5) for seed in range(24)]
    written = llama.generate_ids(requests)
    ended = [ids[-1] in (NEWLINE, EOS) for ids in written]
    assert {(end, len(ids) > 1) for ids, end in zip(written, ended, strict=True)} == {
        (True, True),
        (True, False),
        (False, True),
    }
    answers = [ids[:-1] if end and len(ids) > 1 else ids for ids, end in zip(written, ended, strict=True)]
    found = attribute(llama, requests, steps=3, answer="generated")
    gold = [replace(request, answer_ids=ids) for request, ids in zip(requests, answers, strict=True)]
    np.testing.assert_array_equal(found.scores, attribute(llama, gold, steps=3).scores)


def test_progress_is_told_after_every_item(llama: HFEngine) -> None:
    calls: list[tuple[int, int]] = []
    attribute(llama, [tiny_request(s) for s in range(3)], steps=1, progress=lambda *call: calls.append(call))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_attribution_leaves_the_engine_as_it_was(llama: HFEngine) -> None:
    request = tiny_request(0)
    before = llama.measure([request])
    attribute(llama, [replace(request, ablation=Ablation.of([Head(0, 0)]))], steps=2)
    assert llama.measure([request]) == before
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in llama.model.parameters())


def test_what_cannot_be_attributed_is_a_usage_error(llama: HFEngine) -> None:
    with pytest.raises(UsageError, match="no items"):
        attribute(llama, [])
    with pytest.raises(UsageError, match="at least 1"):
        attribute(llama, [tiny_request(0)], steps=0)
    with pytest.raises(UsageError, match="while neurons are scaled"):
        attribute(llama, [tiny_request(0, Ablation.of(neurons=[Neuron(0, 0)]))])
    with pytest.raises(UsageError, match="L9H0 is out of range"):
        attribute(llama, [tiny_request(0, Ablation.of([Head(9, 0)]))])
    with pytest.raises(UsageError, match="empty answer"):
        attribute(llama, [replace(tiny_request(0), answer_ids=())])


def test_decoder_that_normalises_after_the_ffn_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = HFEngine(save_tiny_model(tmp_path_factory.mktemp("olmo2"), "olmo2"))
    with pytest.raises(MeasurementError, match="built like Llama"):
        attribute(engine, [tiny_request(0)])


def test_item_longer_than_the_sliding_window_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    engine = HFEngine(save_tiny_model(tmp_path_factory.mktemp("sliding"), "qwen3", **options))
    fits = tiny_request(0, prompt=5, answer=2)
    assert_close(attribute(engine, [fits], steps=2).scores[0], naive.attribution(engine, fits, 2), 1e-4)
    with pytest.raises(MeasurementError, match="sliding window of 6"):
        attribute(engine, [tiny_request(0, prompt=8)])


def test_continuation_that_does_not_end_like_the_recorded_run_is_a_measurement_error(llama: HFEngine) -> None:
    head = llama.model.get_submodule("lm_head")
    calls = iter([1.0, 1.3])
    handle = head.register_forward_hook(lambda _module, _inputs, output: output * next(calls))
    with pytest.raises(MeasurementError, match="moved the answer's log-probability"):
        attribute(llama, [tiny_request(0)], steps=2)
    handle.remove()


def test_completeness_of_neurons_without_any_effect_is_a_measurement_error() -> None:
    nothing = Attribution(np.zeros((1, 2, 3), dtype=np.float32), np.zeros(4), np.zeros(4))
    with pytest.raises(MeasurementError, match="no neuron affects"):
        _ = nothing.completeness
