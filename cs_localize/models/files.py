"""Which files of a model directory make up the model, and a hash of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from cs_localize.errors import UsageError

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    *_VOCABULARIES,
)
INDEX = "model.safetensors.index.json"
_WHOLE_BYTES = 2 << 30
_LARGEST_HEADER = 100_000_000  # bytes; the limit of the format, so that another file's first bytes are not believed
_PIECES = 16
_PIECE_BYTES = 64 << 10

EntryT = TypeVar("EntryT")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model: those its index lists, else those in the directory, sorted by name."""
    index = directory / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{index} is not an index of safetensors files; fetch the model again") from None
        return [directory / name for name in sorted(names)]
    return sorted(directory.glob("*.safetensors"))


def what_is_missing(directory: Path) -> str | None:
    """The first thing a model directory lacks to be loaded, as a noun phrase, or None if it is complete."""
    if not (directory / "config.json").is_file():
        return "a config.json"
    weights = weight_files(directory)
    if not weights:
        return "safetensors weights"
    absent = [file.name for file in weights if not file.is_file()]
    if absent:
        return absent[0]
    if not any((directory / name).is_file() for name in _VOCABULARIES):
        return f"a tokenizer ({', '.join(_VOCABULARIES)})"
    return None


def fingerprint(directory: Path) -> str:
    """Content hash of a model directory (32 hex digits), the same wherever the directory lies.

    It covers the names and contents of config, tokenizer files and weights. Weights of up to 2 GiB in all are read
    whole, so that any two different models differ. Of larger ones it covers file sizes, the safetensors headers (names,
    dtypes, shapes) and, of every tensor, 16 evenly spaced pieces of 64 KiB, first and last bytes included: another
    training run, a fine-tune, and the removal of a head (its columns of ``o_proj``) or neuron (its column of
    ``down_proj``) are seen, since these lie in every row and a piece is longer than a row; a change confined to a few
    entries may not be.
    """
    digest = hashlib.sha256()
    weights = weight_files(directory)
    whole = sum(file.stat().st_size for file in weights) <= _WHOLE_BYTES
    for file in [*(directory / name for name in sorted(_SMALL) if (directory / name).is_file()), *weights]:
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        for piece in _pieces(file, whole or file.name in _SMALL):
            digest.update(piece)
    return digest.hexdigest()[:32]


def _pieces(file: Path, whole: bool) -> Iterator[bytes]:
    with file.open("rb") as stream:
        if whole:
            while piece := stream.read(1 << 20):
                yield piece
            return
        header, extents = read_header(stream, file, _extent)
        yield header
        start = 8 + len(header)
        for begin, end in sorted(extents):
            for offset in _offsets(end - begin):
                stream.seek(start + begin + offset)
                yield stream.read(min(_PIECE_BYTES, end - begin - offset))


def read_header(
    stream: BinaryIO, file: Path, read_entry: Callable[[str, Mapping[str, Any]], EntryT]
) -> tuple[bytes, list[EntryT]]:
    """Reads the header of a safetensors file.

    Args:
        stream: the file, at its start; afterwards at the end of the header.
        file: its name, for errors.
        read_entry: makes of a tensor's name and entry what is wanted of it.

    Returns:
        The header's bytes, which follow its length of 8 bytes, and what ``read_entry`` made of every tensor.

    Raises:
        UsageError: if it is no such file.
    """
    header = stream.read(min(int.from_bytes(stream.read(8), "little"), _LARGEST_HEADER))
    try:
        return header, [read_entry(name, entry) for name, entry in json.loads(header).items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{file} is not a safetensors file; fetch the model again") from None


def _extent(name: str, entry: Mapping[str, Any]) -> tuple[int, int]:
    """Begin and end of a tensor in the data section of a safetensors file."""
    begin, end = entry["data_offsets"]
    return int(begin), int(end)


def _offsets(size: int) -> list[int]:
    """Where the pieces of a tensor of ``size`` bytes begin; together they cover a small tensor wholly."""
    if size <= _PIECES * _PIECE_BYTES:
        return list(range(0, size, _PIECE_BYTES))
    return [i * (size - _PIECE_BYTES) // (_PIECES - 1) for i in range(_PIECES)]
