from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape, Neuron
from cs_localize.neurons import (
    knowledge_neurons,
    locate,
    overlap,
    pairwise_overlap,
    random_neurons,
    rank,
    split_half,
)

SHAPE = ModelShape(layers=4, heads=2, kv_heads=2, head_dim=4, ffn=500)
neuron_sets = st.frozensets(st.builds(Neuron, st.integers(0, 3), st.integers(0, 9)), min_size=1)


def planted(neurons: list[Neuron], seed: int = 0, height: float = 1.0) -> np.ndarray:
    """Gaussian attribution of spread 0.01, and the given neurons in falling order far above it."""
    scores = np.random.default_rng(seed).normal(0.0, 0.01, (SHAPE.layers, SHAPE.ffn))
    for place, neuron in enumerate(neurons):
        scores[neuron.layer, neuron.neuron] = height - 0.01 * place
    return scores


PLANTED = [Neuron(layer, n) for n in (7, 111, 499) for layer in (3, 0, 1, 2)]


def test_planted_neurons_are_located_and_no_other_highest_first() -> None:
    located = locate(planted(PLANTED), sigma=6.0)
    assert list(located.neurons) == PLANTED
    assert located.rule == "attribution above mean + 6 standard deviations over all neurons of the model"


def test_threshold_is_the_mean_plus_sigma_standard_deviations_of_all_neurons() -> None:
    scores = planted(PLANTED)
    for sigma in (1.0, 3.0, 8.0):
        kept = locate(scores, sigma, fewest=0).neurons
        assert {(n.layer, n.neuron) for n in kept} == set(
            zip(*np.nonzero(scores > scores.mean() + sigma * scores.std()), strict=True)
        )


def test_statistics_by_layer_judge_every_layer_by_itself() -> None:
    scores = planted(PLANTED)
    scores[2] = scores[2] * 0.01 + 5.0
    assert all(neuron.layer == 2 for neuron in locate(scores, sigma=1.7, fewest=0).neurons)
    by_layer = locate(scores, sigma=6.0, statistics="layer")
    assert set(by_layer.neurons) == set(PLANTED)
    assert "of its layer" in by_layer.rule


def test_fewer_than_ten_neurons_above_the_threshold_give_the_top_share_and_the_rule_says_so() -> None:
    located = locate(planted(PLANTED[:2]), sigma=6.0)
    assert located.neurons[:2] == tuple(PLANTED[:2])
    assert len(located.neurons) == 3  # 0.15% of 2,000
    assert located.rule.startswith("top 0.15% by attribution, since only 2 have attribution above mean + 6")
    many = locate(planted(PLANTED[:9]), sigma=6.0)
    assert list(many.neurons) == PLANTED[:9]


@pytest.mark.parametrize("scores", [np.zeros((0, 4)), np.zeros(4), np.full((2, 2), np.nan)])
def test_scores_that_are_no_finite_table_are_a_usage_error(scores: np.ndarray) -> None:
    with pytest.raises(UsageError, match="finite table"):
        locate(scores)


def test_rank_orders_all_neurons_by_score_and_ties_by_place() -> None:
    assert rank(np.array([[1.0, 3.0], [3.0, 2.0]])) == [Neuron(0, 1), Neuron(1, 0), Neuron(1, 1), Neuron(0, 0)]


@given(neuron_sets, neuron_sets)
def test_overlap_is_symmetric_and_ordered(a: frozenset[Neuron], b: frozenset[Neuron]) -> None:
    measure = overlap(a, b, 40)
    assert measure == overlap(b, a, 40)
    assert 0.0 <= measure.iou <= measure.max <= measure.min <= 1.0
    assert measure.chance == min(len(a), len(b)) / 40


@given(neuron_sets)
def test_overlap_of_a_set_with_itself_is_one_and_with_its_complement_nil(a: frozenset[Neuron]) -> None:
    same = overlap(a, a, 40)
    assert (same.max, same.min, same.iou) == (1.0, 1.0, 1.0)
    rest = {Neuron(layer, n) for layer in range(4) for n in range(10)} - a
    apart = overlap(a, rest, 40)
    assert (apart.max, apart.min, apart.iou) == (0.0, 0.0, 0.0)


def test_overlap_of_known_sets() -> None:
    a = [Neuron(0, n) for n in range(4)]
    b = [Neuron(0, n) for n in range(2, 12)]
    measure = overlap(a, b, 100)
    assert (measure.max, measure.min, measure.iou) == (2 / 10, 2 / 4, 2 / 12)
    assert measure.chance == 4 / 100
    assert overlap([], b, 100).max == 0.0
    with pytest.raises(UsageError, match="cannot come from"):
        overlap(a, b, 9)


def test_chance_is_the_overlap_of_random_sets_on_average() -> None:
    rng = np.random.default_rng(0)
    draws = [
        overlap(
            [Neuron(0, int(n)) for n in rng.choice(200, 30, replace=False)],
            [Neuron(0, int(n)) for n in rng.choice(200, 50, replace=False)],
            200,
        )
        for _ in range(400)
    ]
    assert np.mean([draw.max for draw in draws]) == pytest.approx(draws[0].chance, abs=0.01)


def test_pairwise_overlap_is_the_mean_over_all_pairs() -> None:
    a, b, c = [Neuron(0, 0), Neuron(0, 1)], [Neuron(0, 1), Neuron(0, 2)], [Neuron(0, 9)]
    assert pairwise_overlap([a, b, c], 10).max == pytest.approx((0.5 + 0 + 0) / 3)
    with pytest.raises(UsageError, match="at least two"):
        pairwise_overlap([a], 10)


def test_knowledge_neurons_of_an_item_exceed_a_share_of_its_own_maximum() -> None:
    scores = np.zeros((3, 2, 5))
    scores[0, 0] = [1.0, 0.19, 0.21, -3.0, 0.0]
    scores[1, 1] = [0.01, 0.0, 0.0, 0.0, 0.003]
    scores[2] = -1.0
    assert knowledge_neurons(scores) == [
        {Neuron(0, 0), Neuron(0, 2)},
        {Neuron(1, 0), Neuron(1, 4)},
        frozenset(),
    ]


def test_halves_overlap_wholly_where_items_share_their_neurons_and_not_where_each_has_its_own() -> None:
    shared = np.stack([planted(PLANTED, seed) for seed in range(8)])
    assert split_half(shared, np.random.default_rng(0)).iou == 1.0
    own = [[Neuron(layer, 20 * item + n) for layer in range(4) for n in range(6)] for item in range(8)]
    apart = np.stack([planted(neurons, seed) for seed, neurons in enumerate(own)])
    assert split_half(apart, np.random.default_rng(0)).iou == 0.0


def test_halves_are_drawn_from_the_seed_and_need_two_items() -> None:
    others = [Neuron(n.layer, n.neuron - 1) for n in PLANTED]
    scores = np.stack([planted(neurons, seed) for seed, neurons in enumerate([PLANTED, PLANTED, others, others])])
    draws = [split_half(scores, np.random.default_rng(seed)) for seed in (*range(12), 0)]
    assert draws[0] == draws[-1]
    assert {draw.iou for draw in draws} == {0.0, 1.0}
    with pytest.raises(UsageError, match="two items"):
        split_half(scores[:1], np.random.default_rng(0))


@given(neuron_sets, st.integers(0, 2**32 - 1))
def test_random_neurons_keep_the_count_of_every_layer_and_leave_the_located_ones_out(
    located: frozenset[Neuron], seed: int
) -> None:
    shape = ModelShape(layers=4, heads=1, kv_heads=1, head_dim=2, ffn=20)
    drawn = random_neurons(located, shape, np.random.default_rng(seed))
    assert len(set(drawn)) == len(drawn)
    assert not located & set(drawn)
    for layer in range(4):
        assert sum(n.layer == layer for n in drawn) == sum(n.layer == layer for n in located)
    assert drawn == random_neurons(located, shape, np.random.default_rng(seed))


def test_random_neurons_reach_every_other_neuron_and_refuse_a_layer_without_enough() -> None:
    shape = ModelShape(layers=1, heads=1, kv_heads=1, head_dim=2, ffn=6)
    rng = np.random.default_rng(0)
    seen = {n for _ in range(60) for n in random_neurons([Neuron(0, 0)], shape, rng)}
    assert seen == {Neuron(0, n) for n in range(1, 6)}
    with pytest.raises(UsageError, match="layer 0 has 2 other neurons"):
        random_neurons([Neuron(0, n) for n in range(4)], shape, rng)
    with pytest.raises(UsageError, match="out of range"):
        random_neurons([Neuron(0, 6)], shape, rng)


def test_importing_the_room_loads_no_torch() -> None:
    code = "import sys, cs_localize.neurons; print('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
