"""Copies of safetensors files in which some columns of some matrices are zero.

The format is a length, a JSON header and the bytes of the tensors one after the other. Only the bytes of the columns
change: names, dtypes, order and metadata stay, and a piece of one tensor is all that is ever in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cs_localize.errors import UsageError
from cs_localize.models.files import read_header

FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an entry by dtype, for the dtypes in which a number of zero bytes is zero and nothing is scaled."""

_PIECE_BYTES = 4 << 20

Columns = Mapping[str, Sequence[range]]
"""Columns of matrices, by the name of the tensor."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as the header of a safetensors file describes it.

    Attributes:
        name: its name.
        dtype: as the format spells it, such as ``BF16``.
        shape: its dimensions, row-major.
        begin: where its bytes begin in the file.
        end: where they end.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_tensors(file: Path) -> list[Tensor]:
    """The tensors of a safetensors file in the order of their bytes; only the header is read.

    Raises:
        UsageError: if it is no such file, or not whole.
    """
    with file.open("rb") as stream:
        _, tensors = read_header(stream, file, lambda name, entry: _tensor(name, entry, stream.tell()))
        start = stream.tell()
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    bounds = [start, *(tensor.end for tensor in tensors)]
    gapless = all(tensor.begin == end for tensor, end in zip(tensors, bounds, strict=False))
    if not gapless or not all(map(_has_its_bytes, tensors)) or file.stat().st_size != bounds[-1]:
        raise UsageError(f"{file} is cut short or damaged; fetch the model again")
    return tensors


def _tensor(name: str, entry: Mapping[str, Sequence[int]], start: int) -> Tensor:
    begin, end = entry["data_offsets"]
    return Tensor(name, str(entry["dtype"]), tuple(map(int, entry["shape"])), start + int(begin), start + int(end))


def _has_its_bytes(tensor: Tensor) -> bool:
    width = FLOAT_BYTES.get(tensor.dtype)
    return width is None or math.prod(tensor.shape) * width == tensor.end - tensor.begin


def copy_with_zeros(source: Path, target: Path, columns: Columns) -> None:
    """Copies a safetensors file and makes columns of its matrices zero.

    Args:
        source: the file.
        target: the copy; the bytes are on the disk when this returns.
        columns: by name of a matrix ``[rows, columns]`` of a dtype in ``FLOAT_BYTES``; what this file lacks is ignored.

    Raises:
        UsageError: if the source is not a whole safetensors file.
        OSError: if it cannot be read, or the copy cannot be written.
    """
    with source.open("rb") as reading, target.open("wb") as writing:
        for tensor in read_tensors(source):
            _copy(reading, writing, tensor.begin - reading.tell())  # the header, before the first of them
            if tensor.name in columns:
                _copy_matrix(reading, writing, tensor, columns[tensor.name])
            else:
                _copy(reading, writing, tensor.end - tensor.begin)
        writing.flush()
        os.fsync(writing.fileno())  # some file systems say only now that they are full


def _copy(reading: BinaryIO, writing: BinaryIO, size: int) -> None:
    for start in range(0, size, _PIECE_BYTES):
        writing.write(reading.read(min(_PIECE_BYTES, size - start)))


def _copy_matrix(reading: BinaryIO, writing: BinaryIO, tensor: Tensor, columns: Sequence[range]) -> None:
    rows, width = tensor.shape
    entry = FLOAT_BYTES[tensor.dtype]
    at_once = max(1, _PIECE_BYTES // (width * entry))
    for start in range(0, rows, at_once):
        count = min(at_once, rows - start)
        piece = np.frombuffer(bytearray(reading.read(count * width * entry)), np.uint8).reshape(count, width, entry)
        for span in columns:
            piece[:, span.start : span.stop] = 0
        writing.write(piece.data)
