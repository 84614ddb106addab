"""The designs that a study can ask for, as the sparse method measures them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cs_localize.config import DesignConfig, PilotConfig
from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.measure.planted import PlantedEngine, PlantedOptions
from cs_localize.methods import Localization, Sparse
from cs_localize.outcomes import Item
from tests.methods.builders import EngineMeasurer

SHAPE = ModelShape(layers=10, heads=6, kv_heads=2, head_dim=8, ffn=16)
TASKS = ("a", "b")
ITEMS = {task: [Item(task, f"{n}", f"{task} {n}:", f" {n}") for n in range(12)] for task in TASKS}


def localized(**design: object) -> tuple[Localization, EngineMeasurer]:
    options = PlantedOptions(TASKS, n_specific=2, n_universal=2, background=0.01)
    measurer = EngineMeasurer(PlantedEngine(SHAPE, options))
    return Sparse(DesignConfig.model_validate(design), seed=3).localize(measurer, SHAPE, ITEMS, {}), measurer


def test_a_layer_is_knocked_out_as_often_as_the_study_says_whatever_the_pilot_finds() -> None:
    found, _ = localized(requests=400, density=0.1, layer_density={0: 0.2, "3-4": 0.02, "9": 0})
    assert found.sparse is not None
    drawn = found.sparse.designs["a"].masks[found.sparse.pilot :].reshape(-1, 10, 6).mean(axis=(0, 2))
    assert drawn[[0, 3, 4, 9]] == pytest.approx([0.2, 0.02, 0.02, 0.0], abs=0.01)
    assert found.sparse.coverage["a"].warning is not None, "what is never knocked out is hardly tested"


def test_a_layer_that_the_model_lacks_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"design.layer_density: there is no layer 10; this model has layers 0..9"):
        localized(requests=60, layer_density={"8-10": 0.1})


def test_whole_groups_are_knocked_out_and_their_heads_are_ranked_together() -> None:
    found, measurer = localized(requests=300, density=0.12, knock_out="kv_group")
    assert found.sparse is not None
    masks = found.sparse.table.masks.reshape(-1, 20, 3)
    assert (masks == masks[:, :, :1]).all()
    for task in TASKS:
        leading = {*found.ranking[task][:3]}
        assert leading == {*SHAPE.kv_group(found.ranking[task][0])}
        assert leading & {*measurer.engine.truth(task), *measurer.engine.group()}
    assert found.sparse.coverage["a"].coherence < 1.0, "of groups"


def test_given_masks_are_what_is_asked_with_no_pilot_before_them(tmp_path: Path) -> None:
    masks = np.random.default_rng(0).random((50, 60)) < 0.1
    masks[:, 0] = True
    np.save(tmp_path / "m.npy", masks)
    found, measurer = localized(requests=50, masks=str(tmp_path / "m.npy"))
    assert found.sparse is not None
    assert found.requests == dict.fromkeys(TASKS, 50)
    assert np.array_equal(found.sparse.designs["b"].masks, masks)
    asked = Counter(r.ablation.encode() for r in measurer.asked if not r.ablation.empty)
    assert set(asked.values()) == {2}, "once for every task"


def test_the_design_of_an_earlier_study_can_be_asked_again(tmp_path: Path) -> None:
    first, _ = localized(requests=80, pilot=PilotConfig(requests_a_layer=0))
    assert first.sparse is not None
    arrays = {f"{task}.masks": design.masks for task, design in first.sparse.designs.items()}
    np.savez(tmp_path / "design.npz", **arrays)
    again, _ = localized(requests=80, masks=str(tmp_path / "design.npz"))
    assert again.sparse is not None
    for task in TASKS:
        assert np.array_equal(again.sparse.designs[task].masks, first.sparse.designs[task].masks)
