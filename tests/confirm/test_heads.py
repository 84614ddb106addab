from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs_localize.config import ConfirmConfig
from cs_localize.confirm.heads import confirm_heads, random_heads
from cs_localize.errors import UsageError
from cs_localize.findings import dump_file
from cs_localize.heads import Ablation, Head
from cs_localize.measure.protocol import Request
from cs_localize.outcomes import Outcome
from cs_localize.recover import holm
from tests.confirm.builders import (
    HELD_OUT,
    NAMED,
    RANKING,
    RELATIVES,
    SHAPE,
    UNIVERSAL,
    WorldMeasurer,
    confirmed,
    with_pairs,
)

GOLDEN = Path(__file__).parent / "golden" / "confirm.json"
SMALL = ConfirmConfig(random_draws=4, curve=3, bootstrap=400)


def accuracy(task: str, ablation: Ablation) -> float:
    measurer = WorldMeasurer()
    return float(np.mean([measurer.answer(measurer.request(i, ablation, "generate")).correct for i in HELD_OUT[task]]))


def test_confirm_json_is_the_golden_file_byte_for_byte() -> None:
    assert dump_file(with_pairs()) == GOLDEN.read_text(encoding="utf-8")


def test_the_matrix_measures_every_task_under_all_named_heads_of_every_task_that_has_some() -> None:
    found = confirmed()
    assert list(found.matrix) == ["antonyms", "plurals"]
    for target, row in found.matrix.items():
        assert list(row) == list(HELD_OUT)
        for task, cell in row.items():
            assert cell.accuracy == accuracy(task, Ablation.of(NAMED[target]))
            assert cell.drop == pytest.approx(found.baseline[task] - cell.accuracy)
            assert cell.ci[0] <= cell.drop <= cell.ci[1]


def test_universal_heads_are_one_more_row_and_share_the_correction_with_the_matrix() -> None:
    found = confirmed()
    assert {task: cell.accuracy for task, cell in found.universal.items()} == {
        task: accuracy(task, Ablation.of([UNIVERSAL])) for task in HELD_OUT
    }
    cells = [cell for row in (*found.matrix.values(), found.universal) for cell in row.values()]
    assert len(cells) == 15
    np.testing.assert_allclose([cell.p_holm for cell in cells], holm(np.array([cell.p for cell in cells])))


@pytest.mark.parametrize(("damage", "sign"), [(0.6, 1), (-0.6, -1)])
def test_p_tosses_a_coin_for_every_item_that_changed_whichever_way(damage: float, sign: int) -> None:
    found = confirmed(WorldMeasurer(background=0.0, hurts={"capitals": {Head(2, 1): damage}}))
    row = found.matrix["plurals"]
    changed = sign * row["capitals"].drop * len(HELD_OUT["capitals"])
    assert changed > 3
    assert row["capitals"].p == pytest.approx(2 / 2**changed)
    assert {cell.p for task, cell in row.items() if task != "capitals"} == {1.0}


def test_the_contrast_leaves_relatives_out_of_the_controls() -> None:
    found = confirmed()
    row = found.matrix["plurals"]
    assert row["past_tense"].drop > 0.4
    controls = [row[task].drop for task in ("antonyms", "capitals", "copying")]
    assert found.contrast["plurals"][0] == pytest.approx(row["plurals"].drop - sum(controls) / 3)


def test_curves_start_at_the_baseline_and_zero_the_first_heads_of_the_ranking() -> None:
    found = confirmed()
    assert list(found.curve) == list(RANKING)
    for task, curve in found.curve.items():
        controls = {"plurals": ["antonyms", "capitals", "copying"]}.get(task, [t for t in HELD_OUT if t != task])
        assert len(curve) == min(3, len(RANKING[task])) + 1
        for k, value in enumerate(curve):
            ablation = Ablation.of(RANKING[task][:k])
            assert value == accuracy(task, ablation)
            assert found.control_curve[task][k] == pytest.approx(np.mean([accuracy(t, ablation) for t in controls]))


def test_random_heads_come_from_the_layers_of_the_named_ones_and_are_measured_on_target_and_controls() -> None:
    found = confirmed()
    assert list(found.random) == ["antonyms", "plurals"]
    for task, drawn in found.random.items():
        assert len(drawn.heads) == len(drawn.draws) == len(drawn.controls) == 4
        for heads, drop in zip(drawn.heads, drawn.draws, strict=True):
            ablation = Ablation.decode(",".join(heads))
            assert [Head.parse(head).layer for head in heads] == [head.layer for head in sorted(NAMED[task])]
            assert drop == pytest.approx(found.baseline[task] - accuracy(task, ablation))
        assert drawn.mean_drop == pytest.approx(np.mean(drawn.draws))


def test_random_heads_on_the_target_alone_cost_no_requests_on_controls() -> None:
    found = confirmed(config=ConfirmConfig(random_draws=4, curve=3, bootstrap=400, random_on="target"))
    assert {task: drawn.controls for task, drawn in found.random.items()} == {"antonyms": [], "plurals": []}
    assert {t: d.draws for t, d in found.random.items()} == {t: d.draws for t, d in confirmed().random.items()}
    assert found.requests < confirmed().requests


def test_noise_is_the_share_of_answers_that_a_second_unablated_run_grades_otherwise() -> None:
    items = sum(len(items) for items in HELD_OUT.values())
    assert confirmed().noise == len(range(0, items, 13)) / items


def test_the_repeat_asks_the_baseline_of_every_item_and_is_counted() -> None:
    measurer = WorldMeasurer()
    repeated: list[str] = []

    def repeat(requests: Sequence[Request]) -> list[Outcome]:
        repeated.extend(request.item.id for request in requests)
        assert all(request.ablation.empty and request.mode == "generate" for request in requests)
        return measurer.repeat(requests)

    found = confirm_heads(measurer, HELD_OUT, NAMED, RANKING, (), RELATIVES, SHAPE, SMALL, 7, repeat)
    ((stage, requests),) = measurer.batches
    assert stage == "confirm"
    assert repeated == [item.id for items in HELD_OUT.values() for item in items]
    assert found.requests == len({request.key for request in requests}) + len(repeated)
    assert found.universal == {}


def test_a_cell_keeps_its_interval_when_another_task_joins_the_study() -> None:
    fewer = {task: items for task, items in HELD_OUT.items() if task != "copying"}
    measurer = WorldMeasurer()
    found = confirm_heads(measurer, fewer, NAMED, RANKING, (), RELATIVES, SHAPE, SMALL, 7, measurer.repeat)
    full = confirmed()
    assert {t: c.ci for t, c in found.matrix["antonyms"].items()} == {
        t: c.ci for t, c in full.matrix["antonyms"].items() if t != "copying"
    }
    assert found.random["antonyms"].heads == full.random["antonyms"].heads


def test_a_lone_task_has_neither_contrast_nor_control_curve() -> None:
    alone = {"antonyms": HELD_OUT["antonyms"]}
    measurer = WorldMeasurer()
    named = {"antonyms": NAMED["antonyms"]}
    found = confirm_heads(measurer, alone, named, named, (), {}, SHAPE, SMALL, 7, measurer.repeat)
    assert found.contrast == {}
    assert found.control_curve == {"antonyms": []}
    assert found.random["antonyms"].controls == []
    assert len(found.curve["antonyms"]) == 3


def test_with_nothing_named_only_baselines_and_curves_remain() -> None:
    measurer = WorldMeasurer()
    named: dict[str, tuple[Head, ...]] = dict.fromkeys(NAMED, ())
    found = confirm_heads(measurer, HELD_OUT, named, RANKING, (), RELATIVES, SHAPE, SMALL, 7, measurer.repeat)
    assert (found.matrix, found.universal, found.contrast, found.random) == ({}, {}, {}, {})
    assert list(found.curve) == list(RANKING)


def test_heads_for_a_task_without_held_out_items_are_refused() -> None:
    measurer = WorldMeasurer()
    with pytest.raises(UsageError, match="task 'cooking' has heads but no held-out items"):
        confirm_heads(measurer, HELD_OUT, {"cooking": [Head(1, 1)]}, {}, (), {}, SHAPE, SMALL, 7, measurer.repeat)


@settings(derandomize=True, deadline=None)
@given(st.sets(st.builds(Head, st.integers(0, 5), st.integers(0, 3)), max_size=8), st.integers(0, 1000))
def test_a_draw_has_other_heads_of_the_same_layers_none_twice(named: set[Head], seed: int) -> None:
    drawn = random_heads(sorted(named), SHAPE, np.random.default_rng(seed))
    assert not named & set(drawn)
    assert len(set(drawn)) == len(drawn)
    wanted = Counter(head.layer for head in named)
    assert Counter(head.layer for head in drawn) == Counter(
        {layer: min(count, SHAPE.heads - count) for layer, count in wanted.items() if count < SHAPE.heads}
    )


def test_draws_reach_every_other_head_of_the_layer() -> None:
    rng = np.random.default_rng(0)
    drawn = {head for _ in range(100) for head in random_heads([Head(2, 1)], SHAPE, rng)}
    assert drawn == {Head(2, 0), Head(2, 2), Head(2, 3)}


def test_a_draw_for_a_head_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="L9H0 is out of range"):
        random_heads([Head(9, 0)], SHAPE, np.random.default_rng(0))


def test_a_layer_with_too_few_other_heads_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    measurer = WorldMeasurer()
    named = {"antonyms": (Head(3, 0), Head(3, 1), Head(3, 2))}
    with caplog.at_level(logging.WARNING):
        found = confirm_heads(measurer, HELD_OUT, named, {}, (), {}, SHAPE, SMALL, 7, measurer.repeat)
    assert found.random["antonyms"].heads == [["L3H3"]] * 4
    assert caplog.messages == ["antonyms: too few other heads: a random draw has 1 for 3 named ones"]


def test_counts_are_shares_of_the_unablated_count_by_head_set_and_random_draw() -> None:
    class Counting(WorldMeasurer):
        def answer(self, request: Request) -> Outcome:
            outcome = super().answer(request)
            return replace(outcome, count=2 * outcome.correct) if request.item.task == "antonyms" else outcome

    found = confirmed(Counting())
    (task,) = found.counts
    counts = found.counts[task]
    assert counts.baseline == 2 * round(found.baseline[task] * found.items[task])
    assert set(counts.without) == set(found.matrix)
    for target, left in counts.without.items():
        assert left.count == 2 * round(found.matrix[target][task].accuracy * found.items[task])
        assert left.share == pytest.approx(left.count / counts.baseline)
    assert len(counts.random) == len(found.random[task].draws)
    assert confirmed().counts == {}
