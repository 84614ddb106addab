"""A checkpoint without some heads and neurons, which plain transformers and plain vLLM load."""

from __future__ import annotations

import errno
import re
import secrets
import shlex
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from cs_localize import __version__
from cs_localize.errors import UsageError, one_line
from cs_localize.heads import Ablation
from cs_localize.models import LocalModel, resolve
from cs_localize.models.cache import whole_or_nothing
from cs_localize.models.files import INDEX, weight_files
from cs_localize.models.shape import read_config
from cs_localize.models.zeroed import FLOAT_BYTES, Columns, Tensor, copy_with_zeros, read_tensors
from cs_localize.spelling import check_spelling, spell_out

_O_PROJ, _DOWN_PROJ = "self_attn.o_proj.weight", "mlp.down_proj.weight"
_SINGLE = "model.safetensors"
# What is copied besides the weights, at the top of the folder: never a file that may hold a pickle.
_SUFFIXES = {".json", ".jinja", ".txt", ".py", ".tiktoken", ".spm"}
_NAMES = ("tokenizer.model", "spiece.model", "LICENSE", "LICENCE", "NOTICE")
_TEMPLATES = "additional_chat_templates"
_QUANTIZED = ("quantization_config", "compression_config", "quantization")
_QUANTIZED_FILES = ("quantize_config.json", "hf_quant_config.json")
_ADAPTER = "adapter_config.json"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CARD = """\
---
library_name: transformers
---

# {name} without {removed}

A copy of `{name}` in which {removed} contribute nothing. Nothing was trained; every weight that is not listed
below is the source's, bit for bit.

| | |
|---|---|
| source model | `{name}` |
| its fingerprint | `{fingerprint}` |
| heads removed | {heads} |
| neurons removed | {neurons} |
| made with | cs_localize {version} |
| command | `{command}` |

## What was changed

Layers, heads, neurons and columns count from 0.

| tensor | columns set to zero |
|---|---|
{columns}

## What it means

A head is removed by zeros in the columns of `o_proj` that read its output: it still attends, but nothing it reads
reaches the residual stream. A neuron is removed by zeros in the column of `down_proj` that reads it. Biases are as they
were. The checkpoint answers like the source model with the same heads and neurons knocked out; it is neither smaller
nor faster.

Removing heads does not show what they are for: measure what is lost, and what else is. Training can bring a removed
head back. The fingerprint is a hash of the source's config, tokenizer and weights, the same wherever its folder lies.
The source model's licence holds for this copy.
"""


def export_checkpoint(model: str, heads: str, out: Path, *, command: Sequence[str] = ()) -> LocalModel:
    """Writes a copy of a model in which some heads and neurons contribute nothing.

    A head's columns of its layer's ``o_proj`` (``[hidden, heads * head_dim]``) become zero, and a neuron's column of
    ``down_proj`` (``[hidden, ffn]``); biases stay. Files, dtype, config and tokenizer are those of the source, and a
    ``README.md`` says what was removed. The folder appears whole or not at all.

    Args:
        model: a directory, a hub id or a built-in model name.
        heads: what is removed, such as ``L4H2,L3N120``; ``L4G1`` is a KV group, ``L4`` a layer.
        out: the folder to make; if there is one already, it must be empty.
        command: the command line that the ``README.md`` names; by default one that does the same.

    Returns:
        The new checkpoint; its name is the folder.

    Raises:
        UsageError: if the model cannot be had or is quantized, its projections are not found by name, it lacks one of
            the heads or neurons, or the folder is not empty.
        OSError: if the folder cannot be written, a full disk included; nothing is left behind then.
    """
    check_spelling(heads)
    if "=" in heads:
        raise UsageError(f"'{heads}': an export removes heads and neurons; leave the factors out")
    try:
        target = out.expanduser().resolve()
    except RuntimeError as error:  # a link to itself, or nobody's home
        raise UsageError(f"--out {out}: {one_line(error)}; name another folder") from None
    _refuse_occupied(target)
    source = resolve(model)
    ablation = Ablation.decode(spell_out(heads, source.shape))
    ablation.check(source.shape)
    _refuse_more_than_weights(source)
    files = _weight_files(source)
    columns = _columns(source, [tensor for file in files for tensor in read_tensors(file)], ablation)
    command = command or ("cs-localize", "export", "--model", model, "--heads", heads, "--out", str(out))
    with _new_folder(target) as part:
        _copy_the_rest(source.path, part)
        for file in files:
            copy_with_zeros(file, part / file.name, columns)
        (part / "README.md").write_text(_card(source, ablation, columns, command), encoding="utf-8")
    return resolve(str(target))


def _refuse_occupied(target: Path) -> None:
    for folder in (target, *target.parents):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; name a new folder with --out")
    if target.is_dir() and any(target.iterdir()):
        raise UsageError(f"the folder {target} is not empty; name a new one with --out")


def _refuse_more_than_weights(source: LocalModel) -> None:
    """Columns of packed weights are not to be had, and those of an adapter would be added to the zeros."""
    config = read_config(source.path)
    for part in (config, config.get("text_config") or {}):
        for field in filter(part.get, _QUANTIZED):
            method = part[field].get("quant_method", field) if isinstance(part[field], dict) else field
            raise UsageError(f"'{source.name}' is quantized ({method}); export the model it was quantized from")
    for name in _QUANTIZED_FILES:
        if (source.path / name).exists():
            raise UsageError(f"'{source.name}' is quantized ({name}); export the model it was quantized from")
    if (source.path / _ADAPTER).exists():
        raise UsageError(f"'{source.name}' has an adapter ({_ADAPTER}); merge it into the weights and export that")


def _weight_files(source: LocalModel) -> list[Path]:
    """The files of the weights, where every reader of the folder takes the same ones."""
    files = weight_files(source.path)
    indexed, single = (source.path / INDEX).is_file(), source.path / _SINGLE
    clear = single in files or not single.exists() if indexed else files == [single]
    if not clear:
        raise UsageError(
            f"{source.path} needs its weights in {_SINGLE} alone, or in the files that {INDEX} lists alone"
        )
    if any(file.parent != source.path for file in files):
        raise UsageError(f"{INDEX} of '{source.name}' lists files in other folders; put all weights beside it")
    return files


def _columns(source: LocalModel, tensors: Sequence[Tensor], ablation: Ablation) -> Columns:
    """Which columns become zero."""
    shape = source.shape
    columns: dict[str, list[range]] = defaultdict(list)
    if ablation.heads:
        o_proj = _projections(source, tensors, _O_PROJ, shape.heads * shape.head_dim)
        for head, _ in ablation.heads:
            first = head.head * shape.head_dim
            columns[o_proj[head.layer]].append(range(first, first + shape.head_dim))
    if ablation.neurons:
        down_proj = _projections(source, tensors, _DOWN_PROJ, shape.ffn)
        for neuron, _ in ablation.neurons:
            columns[down_proj[neuron.layer]].append(range(neuron.neuron, neuron.neuron + 1))
    return columns


def _projections(source: LocalModel, tensors: Sequence[Tensor], name: str, width: int) -> list[str]:
    """The tensors of one projection, layer by layer: all there, once each, and of the geometry the config says."""
    kind = f"'{source.name}' (model_type '{read_config(source.path).get('model_type')}')"
    pattern = re.compile(rf"(?:.*\.)?layers\.(\d+)\.{re.escape(name)}")
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        match = pattern.fullmatch(tensor.name)
        if match is None or int(match[1]) >= source.shape.layers:
            continue
        if (twin := found.setdefault(int(match[1]), tensor)) is not tensor:
            raise UsageError(f"{kind} has two {name} in layer {match[1]}: {twin.name} and {tensor.name}")
        if tensor.dtype not in FLOAT_BYTES:
            raise UsageError(f"{tensor.name} of {kind} is {tensor.dtype}; unquantized weights are needed")
        if len(tensor.shape) != 2 or tensor.shape[1] != width:
            raise UsageError(f"{tensor.name} of {kind} is {list(tensor.shape)}, expected {width} columns")
    for layer in range(source.shape.layers):
        if layer not in found:
            raise UsageError(f"{kind} has no tensor layers.{layer}.{name}; what it computes there has another name")
    return [found[layer].name for layer in range(source.shape.layers)]


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder that takes the target's place when the block ends; if the block fails, none that was made is left."""
    parents = [folder for folder in target.parents if not folder.exists()]
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_or_nothing(target, part):
            yield part
    except BaseException as error:
        for folder in parents:
            with suppress(OSError):  # not there, or something else is in it by now
                folder.rmdir()
        if isinstance(error, OSError):
            _explain(error, target)
        raise


def _explain(error: OSError, target: Path) -> None:
    """Raises a clearer error where there is one: a copy that does not fit names the file it was copied from."""
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
        _refuse_occupied(target)
    if error.errno == errno.EBUSY:
        raise UsageError(f"{target} is in use or a mount point; name a new folder in it with --out") from error
    if error.errno in _FULL:
        raise OSError(error.errno, error.strerror, str(target)) from error


def _copy_the_rest(source: Path, part: Path) -> None:
    """Config, generation config, tokenizer, the index of the weights and the licence."""
    for file in sorted(source.iterdir()):
        listing = file.name.endswith(".index.json") and file.name != INDEX  # of weights that are not copied
        if file.is_file() and not listing and (file.suffix in _SUFFIXES or file.name.startswith(_NAMES)):
            shutil.copyfile(file, part / file.name)
    if (source / _TEMPLATES).is_dir():
        (part / _TEMPLATES).mkdir()
        for template in sorted((source / _TEMPLATES).iterdir()):
            if template.is_file():
                shutil.copyfile(template, part / _TEMPLATES / template.name)


def _card(source: LocalModel, ablation: Ablation, columns: Columns, command: Sequence[str]) -> str:
    counts = ((len(ablation.heads), "attention head"), (len(ablation.neurons), "FFN neuron"))
    return _CARD.format(
        name=source.name,
        removed=" and ".join(f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts if count),
        fingerprint=source.fingerprint,
        heads=", ".join(str(head) for head, _ in ablation.heads) or "none",
        neurons=", ".join(str(neuron) for neuron, _ in ablation.neurons) or "none",
        version=__version__,
        command=shlex.join(command),
        columns="\n".join(f"| `{name}` | {', '.join(map(_span, spans))} |" for name, spans in sorted(columns.items())),
    )


def _span(columns: range) -> str:
    return str(columns.start) if len(columns) == 1 else f"{columns.start}-{columns.stop - 1}"
