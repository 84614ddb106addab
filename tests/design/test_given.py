from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cs_localize.design import given_design, read_masks
from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape

SHAPE = ModelShape(layers=3, heads=4, kv_heads=2, head_dim=8, ffn=16)
MASKS = np.random.default_rng(0).random((7, 12)) < 0.4
MASKS[:, 0] = True


def test_masks_are_read_from_every_kind_of_file_in_their_order(tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", MASKS)
    np.save(tmp_path / "layers.npy", MASKS.reshape(7, 3, 4).astype(int))
    np.savez(tmp_path / "all.npz", masks=MASKS.astype(float), seed=np.array(0))
    lists = [[str(SHAPE.head(int(i))) for i in np.flatnonzero(mask)] for mask in MASKS]
    lines = "\n\n".join(map(json.dumps, lists)) + "\n"
    (tmp_path / "lists.jsonl").write_text(lines, encoding="utf-8")
    for name in ("flat.npy", "layers.npy", "all.npz", "lists.jsonl"):
        assert np.array_equal(read_masks(tmp_path / name, SHAPE, "a"), MASKS)


def test_a_task_has_masks_of_its_own_in_an_archive_that_names_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "design.npz", **{"a.masks": MASKS, "a.items": np.arange(7), "b.masks": MASKS[::-1]})
    assert np.array_equal(read_masks(tmp_path / "design.npz", SHAPE, "b"), MASKS[::-1])
    with pytest.raises(UsageError, match=r"no array 'masks' or 'c.masks'; it has a.masks, a.items, b.masks"):
        read_masks(tmp_path / "design.npz", SHAPE, "c")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[", "give a list of heads"),
        ("[" * 100_000, "give a list of heads"),
        ('"L0H0"', "give a list of heads"),
        ("[]", "give a list of heads"),
        ("[3]", "give a list of heads"),
        ('["L0H9"]', "L0H9 is out of range"),
        ('["head 3"]', "'head 3' is not a head"),
        ('["L0H0", "L0H0"]', "a head is listed twice"),
    ],
)
def test_a_line_that_is_no_mask_is_told_with_its_number(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "m.jsonl").write_text(f'["L0H0"]\n\n{line}\n', encoding="utf-8")
    with pytest.raises(UsageError, match=f"m.jsonl, line 3: .*{problem}"):
        read_masks(tmp_path / "m.jsonl", SHAPE, "a")


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.ones((7, 11)), r"is \[7, 11\]; this model needs \[masks, 12\] or \[masks, 3, 4\]"),
        (np.ones(12), r"is \[12\]"),
        (np.ones((0, 12)), "holds no masks"),
        (np.full((2, 12), 2), "must hold true and false, or 1 and 0"),
        (np.full((2, 12), np.nan), "must hold true and false"),
        (np.full((2, 12), "x"), "must hold true and false"),
        (np.eye(2, 12, dtype=bool)[[0, 0, 1]] & np.array([[1], [1], [0]], bool), "mask 3 knocks out no head"),
        (np.array([[{}]], dtype=object), "it is damaged, or of another format"),
    ],
)
def test_an_array_that_is_no_masks_is_one_line(tmp_path: Path, array: np.ndarray, problem: str) -> None:
    np.save(tmp_path / "m.npy", array, allow_pickle=True)
    with pytest.raises(UsageError, match=problem):
        read_masks(tmp_path / "m.npy", SHAPE, "a")


@pytest.mark.parametrize("name", ["m.npy", "m.npz", "m.jsonl", "m.csv"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"No such file|neither .npy nor .npz nor .jsonl"):
        read_masks(tmp_path / name, SHAPE, "a")
    (tmp_path / name).write_bytes(b"\xff\x00not masks")
    with pytest.raises(UsageError, match=r"damaged|neither .npy nor .npz nor .jsonl"):
        read_masks(tmp_path / name, SHAPE, "a")


def test_a_folder_is_no_file_of_masks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is a folder; give a file, such as the design.npz of a study's folder"):
        read_masks(tmp_path, SHAPE, "a")


def test_given_masks_are_used_in_order_and_again_with_items_in_turn() -> None:
    design = given_design(MASKS, "request", 20, 5, 1, np.random.default_rng(0))
    assert np.array_equal(design.masks, MASKS[np.arange(20) % 7])
    assert np.bincount(design.items).tolist() == [4] * 5
    blocks = given_design(MASKS, "block", 8, 5, 3, np.random.default_rng(0))
    assert np.array_equal(blocks.masks, MASKS[[0, 0, 0, 1, 1, 1, 2, 2]])


def test_more_requests_than_masks_and_items_make_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="7 masks and 5 items make 35 different requests, and 36"):
        given_design(MASKS, "request", 36, 5, 1, np.random.default_rng(0))
