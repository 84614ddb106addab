"""Masks that a user gives in a file."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import UsageError
from cs_localize.heads import Head, ModelShape

Masks = NDArray[np.bool_]


def read_masks(path: Path, shape: ModelShape, task: str) -> Masks:
    """The masks of one task from a file.

    Args:
        path: ``.npy`` with one array; ``.npz`` with an array called ``masks`` for all tasks or ``TASK.masks`` for each,
            as a study's own ``design.npz`` has; or ``.jsonl``, JSON Lines that each list the heads of one mask, such as
            ``["L4H2", "L7H0"]``. Arrays are ``[masks, n_heads]`` or ``[masks, layers, heads]`` of true and false or 1
            and 0, true where the head is knocked out.
        shape: geometry of the model.
        task: whose masks.

    Returns:
        ``[masks, n_heads]``, in the order of the file.

    Raises:
        UsageError: if the file cannot be read, holds no masks, or a mask is empty or not of this model; with the number
            of the line, or of the mask counted from 1.
    """
    if path.is_dir():
        raise UsageError(f"design.masks: {path} is a folder; give a file, such as the design.npz of a study's folder")
    if path.suffix == ".jsonl":
        masks = _from_lines(path, shape)
    elif path.suffix in (".npy", ".npz"):
        masks = _from_array(path, shape, task)
    else:
        raise UsageError(f"design.masks: {path} is neither .npy nor .npz nor .jsonl")
    if not len(masks):
        raise UsageError(f"design.masks: {path} holds no masks")
    return masks


def _from_lines(path: Path, shape: ModelShape) -> Masks:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"design.masks: cannot read {path}: {_problem(error)}") from None
    masks = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                masks.append(_mask(line, shape))
            except UsageError as error:
                raise UsageError(f"design.masks: {path}, line {number}: {error}") from None
    return np.array(masks, dtype=bool).reshape(-1, shape.n_heads)


def _mask(line: str, shape: ModelShape) -> Masks:
    try:
        names = json.loads(line)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UsageError('give a list of heads, such as ["L4H2", "L7H0"]')
    positions = [shape.index(Head.parse(name)) for name in names]
    if len(set(positions)) < len(positions):
        raise UsageError("a head is listed twice")
    mask = np.zeros(shape.n_heads, dtype=bool)
    mask[positions] = True
    return mask


def _from_array(path: Path, shape: ModelShape, task: str) -> Masks:
    array = _array(path, task)
    kinds = {(shape.n_heads,), (shape.layers, shape.heads)}
    if array.ndim < 2 or array.shape[1:] not in kinds:
        raise UsageError(
            f"design.masks: the array in {path} is {list(array.shape)}; this model needs [masks, {shape.n_heads}] or "
            f"[masks, {shape.layers}, {shape.heads}]"
        )
    if array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
        raise UsageError(f"design.masks: the array in {path} must hold true and false, or 1 and 0")
    masks = array.astype(bool).reshape(len(array), shape.n_heads)
    empty = np.flatnonzero(~masks.any(axis=1))
    if len(empty):
        raise UsageError(f"design.masks: {path}, mask {empty[0] + 1} knocks out no head")
    return masks


def _array(path: Path, task: str) -> NDArray[np.generic]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            for name in (f"{task}.masks", "masks"):
                if name in loaded:
                    return np.asarray(loaded[name])
            has = ", ".join(loaded) or "none"
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise UsageError(f"design.masks: cannot read {path}: {_problem(error)}") from None
    raise UsageError(f"design.masks: {path} has no array 'masks' or '{task}.masks'; it has {has}")


def _problem(error: Exception) -> str:
    return getattr(error, "strerror", None) or "it is damaged, or of another format"
