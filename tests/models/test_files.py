from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cs_localize.errors import UsageError
from cs_localize.models import files
from cs_localize.models.files import fingerprint, weight_files, what_is_missing
from tests.models.builders import weights, write_model

HEAD_DIM = 8


@pytest.fixture(params=["whole", "sampled"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of reading weights; the limits are scaled down as the tensors are."""
    if request.param == "sampled":
        monkeypatch.setattr(files, "_WHOLE_BYTES", 0)
        monkeypatch.setattr(files, "_PIECES", 3)
        monkeypatch.setattr(files, "_PIECE_BYTES", 256)  # longer than a row, 192 bytes at most, as in a large model


@pytest.mark.usefixtures("reading")
def test_a_copy_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    original = write_model(tmp_path / "a")
    copy = shutil.copytree(original, tmp_path / "b")
    (copy / "README.md").write_text("not part of the model")
    assert fingerprint(copy) == fingerprint(original)


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("head", range(4))
def test_removing_any_one_head_changes_the_fingerprint(tmp_path: Path, layer: int, head: int) -> None:
    tensors = weights()
    tensors[f"model.layers.{layer}.o_proj.weight"][:, head * HEAD_DIM : (head + 1) * HEAD_DIM] = 0
    assert fingerprint(write_model(tmp_path / "a", tensors)) != fingerprint(write_model(tmp_path / "b"))


@pytest.mark.usefixtures("reading")
def test_removing_one_neuron_changes_the_fingerprint(tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.layers.1.down_proj.weight"][:, 47] = 0
    assert fingerprint(write_model(tmp_path / "a", tensors)) != fingerprint(write_model(tmp_path / "b"))


@pytest.mark.usefixtures("reading")
def test_other_weights_config_or_tokenizer_change_the_fingerprint(tmp_path: Path) -> None:
    other_tokenizer = write_model(tmp_path / "tokenizer")
    (other_tokenizer / "tokenizer.json").write_text('{"version": 2}')
    models = [
        write_model(tmp_path / "original"),
        write_model(tmp_path / "weights", weights(seed=1)),
        write_model(tmp_path / "config", rope_theta=5.0),
        other_tokenizer,
    ]
    assert len({fingerprint(model) for model in models}) == len(models)


def test_weights_that_are_read_whole_differ_by_a_single_entry(tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.layers.0.o_proj.weight"][17, 17] += 1
    assert fingerprint(write_model(tmp_path / "a", tensors)) != fingerprint(write_model(tmp_path / "b"))


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 5000])
def test_pieces_reach_the_first_and_last_byte_and_cover_small_tensors(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(files, "_PIECES", 4)
    monkeypatch.setattr(files, "_PIECE_BYTES", 256)
    covered = np.zeros(size, dtype=bool)
    offsets = files._offsets(size)
    for offset in offsets:
        covered[offset : offset + 256] = True
    assert len(offsets) <= 4
    assert covered[:1].all()
    assert covered[-1:].all()
    assert covered.all() == (size <= 1024)


@pytest.mark.parametrize(
    ("absent", "named"),
    [("config.json", "config.json"), ("model.safetensors", "safetensors weights"), ("tokenizer.json", "tokenizer")],
)
def test_what_a_model_directory_lacks_is_named(tmp_path: Path, absent: str, named: str) -> None:
    directory = write_model(tmp_path)
    assert what_is_missing(directory) is None
    (directory / absent).unlink()
    assert named in str(what_is_missing(directory))


def test_a_shard_that_the_index_lists_is_missed(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert what_is_missing(directory) == "model-2.safetensors"


def test_only_the_shards_of_the_index_are_the_model(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    save_file(weights(), directory / "consolidated.safetensors")
    index = {"weight_map": dict.fromkeys(weights(), "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(directory) == [directory / "model.safetensors"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    directory = write_model(tmp_path)
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UsageError, match="is not an index"):
        weight_files(directory)


def test_weights_that_are_not_safetensors_are_refused_when_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_WHOLE_BYTES", 0)
    directory = write_model(tmp_path)
    (directory / "model.safetensors").write_bytes(b"version https://git-lfs.example\n" * 4)
    with pytest.raises(UsageError, match="is not a safetensors file"):
        fingerprint(directory)
