"""A small checkpoint to export, and what the verb says of a mistake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cs_localize.cli import main
from tests.models.builders import weights, write_model

O_PROJ = "model.layers.{}.self_attn.o_proj.weight"
DOWN_PROJ = "model.layers.{}.mlp.down_proj.weight"


def model(directory: Path, **fields: object) -> Path:
    """A complete directory of two layers with 4 heads of 8 and 48 neurons; nothing but numpy reads or writes it."""
    tensors = {
        name.replace("o_proj", "self_attn.o_proj").replace("down_proj", "mlp.down_proj"): value
        for name, value in weights().items()
    }
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.ones(32, np.float32)
    return write_model(directory, tensors, **fields)


def read(directory: Path) -> dict[str, np.ndarray]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(("export", *arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("cs-localize: ")
    assert error.count("\n") == 1, "one line"
    return error
