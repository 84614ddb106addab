"""Models that cannot be exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cs_localize.errors import UsageError
from cs_localize.export import export_checkpoint
from tests.exports import O_PROJ, fails, model, read


def rename_o_proj(source: Path) -> None:
    save_file({name.replace("o_proj", "dense"): value for name, value in read(source).items()}, weight(source))


def drop_a_layer(source: Path) -> None:
    save_file({name: value for name, value in read(source).items() if ".layers.1." not in name}, weight(source))


def double_a_layer(source: Path) -> None:
    tensors = read(source)
    save_file({**tensors, f"draft.{O_PROJ.format(0)}": tensors[O_PROJ.format(0)]}, weight(source))


def narrow(source: Path) -> None:
    save_file({name: value[..., :24].copy() for name, value in read(source).items()}, weight(source))


def pack(source: Path) -> None:
    save_file({name: value.astype(np.int8) for name, value in read(source).items()}, weight(source))


def cut(source: Path) -> None:
    weight(source).write_bytes(weight(source).read_bytes()[:-1])


def garble(source: Path) -> None:
    weight(source).write_bytes(b"not safetensors at all")


def rename_the_file(source: Path) -> None:
    weight(source).rename(source / "weights.safetensors")


def shard(source: Path, listed: int) -> None:
    """Two files of one layer each, of which the index lists the first or both."""
    tensors = read(source)
    weight(source).unlink()
    held: list[dict[str, np.ndarray]] = [{}, {}]
    for name, value in tensors.items():
        held[".layers.1." in name][name] = value
    files = [f"model-{number}-of-2.safetensors" for number in (1, 2)]
    for file, part in zip(files, held, strict=True):
        save_file(part, source / file)
    index = {name: file for file, part in list(zip(files, held, strict=True))[:listed] for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def leave_a_shard_out_of_the_index(source: Path) -> None:
    shard(source, 1)


def remove_a_shard(source: Path) -> None:
    shard(source, 2)
    (source / "model-2-of-2.safetensors").unlink()


def write_beside(name: str) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        (source / name).write_text("{}")

    return change


def configure(**fields: object) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | fields))

    return change


def weight(source: Path) -> Path:
    return source / "model.safetensors"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (rename_o_proj, "(model_type 'llama') has no tensor layers.0.self_attn.o_proj.weight"),
        (drop_a_layer, "has no tensor layers.1.self_attn.o_proj.weight"),
        (double_a_layer, "has two self_attn.o_proj.weight in layer 0"),
        (narrow, "is [32, 24], expected 32 columns"),
        (pack, "is I8; unquantized weights are needed"),
        (cut, "cut short or damaged"),
        (garble, "not a safetensors file"),
        (leave_a_shard_out_of_the_index, "has no tensor layers.1.self_attn.o_proj.weight"),
        (remove_a_shard, "lacks model-2-of-2.safetensors"),
        (rename_the_file, "needs its weights in model.safetensors alone"),
        (configure(quantization_config={"quant_method": "gptq"}), "is quantized (gptq)"),
        (configure(quantization={"bits": 4}), "is quantized (quantization)"),
        (write_beside("hf_quant_config.json"), "is quantized (hf_quant_config.json)"),
        (write_beside("adapter_config.json"), "has an adapter (adapter_config.json)"),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused_by_name_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: Callable[[Path], None], message: str
) -> None:
    source = model(tmp_path / "source")
    fault(source)

    assert message in fails(
        capsys, "--model", str(source), "--heads", "L0H0", "--out", str(tmp_path / "deep" / "er" / "out")
    )

    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_model_whose_name_cannot_be_written_down_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "m\udce9")
    with pytest.raises(UsageError, match="is not valid UTF-8"):
        export_checkpoint(str(source), "L0H0", tmp_path / "out")
