from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cs_localize.export import export_checkpoint
from tests.exports import DOWN_PROJ, O_PROJ, model, read


@pytest.mark.parametrize(
    ("removed", "zero"),
    [
        ("L1H2", {O_PROJ.format(1): range(16, 24)}),
        ("L0G1", {O_PROJ.format(0): range(16, 32)}),
        ("L1", {O_PROJ.format(1): range(32)}),
        ("L0N47", {DOWN_PROJ.format(0): range(47, 48)}),
        ("L1H0,L1N3,L1N4", {O_PROJ.format(1): range(8), DOWN_PROJ.format(1): range(3, 5)}),
    ],
)
def test_exactly_the_columns_of_what_is_removed_are_zero_and_all_else_is_the_same_to_the_bit(
    tmp_path: Path, removed: str, zero: dict[str, range]
) -> None:
    source = model(tmp_path / "source")

    export_checkpoint(str(source), removed, tmp_path / "out")

    expected = read(source)
    for name, columns in zero.items():
        expected[name][:, columns.start : columns.stop] = 0
    found = read(tmp_path / "out")
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


def test_shards_index_and_dtype_stay_and_matrices_of_many_pieces_are_done_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cs_localize.models.zeroed._PIECE_BYTES", 300)
    source = model(tmp_path / "source")
    whole = {name: value.astype(np.float16) for name, value in read(source).items()}
    (source / "model.safetensors").unlink()
    names = sorted(whole)
    shards = {"model-1-of-2.safetensors": names[:2], "model-2-of-2.safetensors": names[2:]}
    for file, held in shards.items():
        save_file({name: whole[name] for name in held}, source / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in shards.items() for name in held}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "pytorch_model.bin.index.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    (source / "generation_config.json").write_text('{"eos_token_id": 2}')

    export_checkpoint(str(source), "L0H3,L1H3", tmp_path / "out")

    for layer in range(2):
        whole[O_PROJ.format(layer)][:, 24:] = 0
    found = read(tmp_path / "out")
    assert all((found[name] == value).all() and found[name].dtype == np.float16 for name, value in whole.items())
    copied = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json", *shards}
    assert {file.name for file in (tmp_path / "out").iterdir()} == copied | {"README.md"}
    for name in copied - shards.keys():
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
