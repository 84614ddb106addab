from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers

from cs_localize.config import CrosscheckConfig
from cs_localize.errors import MeasurementError, UsageError
from cs_localize.findings import NeuronSet
from cs_localize.heads import Ablation, Head
from cs_localize.measure.hf import HFEngine
from cs_localize.measure.spec import EngineSpec
from cs_localize.models.files import fingerprint
from cs_localize.models.shape import read_shape
from cs_localize.neurons import knowledge_neurons, locate, locate_neurons_from_spec, pairwise_overlap, rank
from cs_localize.neurons.attribution import attribute
from cs_localize.neurons.reading import Reading
from tests.measure.tiny_models import save_tiny_model, tiny_request

pytestmark = pytest.mark.model

NAMED = (Head(0, 1), Head(1, 2), Head(2, 0))
RANDOM = (Head(0, 0), Head(1, 3), Head(2, 2))
REQUESTS = [tiny_request(seed) for seed in range(6)]
CONFIG = CrosscheckConfig(items=5, steps=4, sigma=2.0)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    directory: Path = save_tiny_model(tmp_path_factory.mktemp("llama"))
    return EngineSpec("hf", str(directory), fingerprint(directory), read_shape(directory))


@pytest.fixture(scope="module")
def found(spec: EngineSpec) -> tuple[NeuronSet, np.ndarray]:
    arguments = pickle.loads(pickle.dumps((spec, REQUESTS, CONFIG, NAMED, RANDOM)))
    finding, scores = locate_neurons_from_spec(*arguments, seed=3)
    return finding, scores


def test_located_neurons_are_those_of_the_mean_attribution_of_the_first_items(
    spec: EngineSpec, found: tuple[NeuronSet, np.ndarray]
) -> None:
    finding, scores = found
    base = attribute(HFEngine.from_spec(spec), REQUESTS[:5], steps=4)
    np.testing.assert_allclose(scores, base.scores.mean(0), rtol=1e-6)
    located = locate(base.scores.mean(0), 2.0)
    assert finding.neurons == [str(neuron) for neuron in located.neurons]
    assert finding.neurons == [str(neuron) for neuron in rank(scores)[: finding.count]]
    assert (finding.items, finding.rule) == (5, located.rule)
    assert finding.ratio == finding.count / spec.shape.n_neurons
    assert finding.completeness == pytest.approx(base.completeness)
    assert finding.knowledge_neurons == pairwise_overlap(knowledge_neurons(base.scores), spec.shape.n_neurons)


def test_attribution_with_heads_zeroed_is_a_share_of_the_unmodified(
    spec: EngineSpec, found: tuple[NeuronSet, np.ndarray]
) -> None:
    finding, scores = found
    engine = HFEngine.from_spec(spec)
    neurons = rank(scores)[: finding.count]
    where = [n.layer for n in neurons], [n.neuron for n in neurons]
    for heads, share in (
        (NAMED, finding.attribution_with_heads_zeroed),
        (RANDOM, finding.random_attribution_with_heads_zeroed),
    ):
        zeroed = attribute(engine, [replace(r, ablation=Ablation.of(heads)) for r in REQUESTS[:5]], steps=4)
        assert share == pytest.approx(zeroed.scores.mean(0)[where].sum() / scores[where].sum(), rel=1e-5)
        assert share != pytest.approx(1.0, abs=1e-3)


def test_fewer_items_with_heads_zeroed_are_compared_with_the_same_items_unmodified(spec: EngineSpec) -> None:
    calls: list[tuple[int, int]] = []
    finding, _ = locate_neurons_from_spec(
        spec, REQUESTS, CONFIG, NAMED, (), zeroed_items=2, progress=lambda *call: calls.append(call)
    )
    engine = HFEngine.from_spec(spec)
    base = attribute(engine, REQUESTS[:2], steps=4).scores
    zeroed = attribute(engine, [replace(r, ablation=Ablation.of(NAMED)) for r in REQUESTS[:2]], steps=4).scores
    chosen = np.isin(np.arange(base[0].size), [_index(name, base.shape[2]) for name in finding.neurons])
    expected = zeroed.sum(0).ravel()[chosen].sum() / base.sum(0).ravel()[chosen].sum()
    assert finding.attribution_with_heads_zeroed == pytest.approx(expected, rel=1e-5)
    assert finding.random_attribution_with_heads_zeroed == 1.0
    assert calls == [(done, 7) for done in range(1, 8)]


def test_reading_and_seed_change_what_they_name(spec: EngineSpec, found: tuple[NeuronSet, np.ndarray]) -> None:
    finding, scores = found
    again, same = locate_neurons_from_spec(spec, REQUESTS, CONFIG, NAMED, RANDOM, seed=3)
    assert again == finding
    np.testing.assert_array_equal(same, scores)
    reading = Reading(target="log_probability", answer="generated", statistics="layer")
    other, changed = locate_neurons_from_spec(spec, REQUESTS, CONFIG, NAMED, RANDOM, reading=reading)
    assert "of its layer" in other.rule
    assert not np.allclose(changed, scores)


def test_too_few_or_ablated_items_are_a_usage_error(spec: EngineSpec) -> None:
    with pytest.raises(UsageError, match="at least two items"):
        locate_neurons_from_spec(spec, REQUESTS[:1], CONFIG, NAMED, RANDOM)
    with pytest.raises(UsageError, match="zeroed_items"):
        locate_neurons_from_spec(spec, REQUESTS, CONFIG, NAMED, RANDOM, zeroed_items=0)
    ablated = [*REQUESTS[:2], replace(REQUESTS[2], ablation=Ablation.of(NAMED))]
    with pytest.raises(UsageError, match="unmodified model, but a request is under 'L0H1,L1H2,L2H0'"):
        locate_neurons_from_spec(spec, ablated, CONFIG, NAMED, RANDOM)
    with pytest.raises(UsageError, match="spec of engine 'vllm'"):
        locate_neurons_from_spec(replace(spec, name="vllm"), REQUESTS, CONFIG, NAMED, RANDOM)


def test_model_whose_neurons_do_nothing_is_a_measurement_error(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    model.save_pretrained(directory)
    dead = EngineSpec("hf", str(directory), "", read_shape(directory))
    with pytest.raises(MeasurementError, match="no positive attribution"):
        locate_neurons_from_spec(dead, REQUESTS, CONFIG, NAMED, RANDOM)


def _index(name: str, ffn: int) -> int:
    layer, neuron = name.removeprefix("L").split("N")
    return int(layer) * ffn + int(neuron)
