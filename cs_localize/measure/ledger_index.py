"""Outcomes in memory, found by key: flat arrays, about 45 bytes an outcome however many there are."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cs_localize.outcomes import Outcome

KEY_BYTES = 16
_MOST_RECENT = 1 << 16


@dataclass(frozen=True)
class Columns:
    """Outcomes of one file.

    Attributes:
        keys: ``[n, 2]`` uint64, each key as two big-endian halves.
        score: ``[n]`` float64.
        correct: ``[n]`` bool.
        tokens: ``[n]`` int64.
        text_ends: ``[n]`` int64, where each text ends in ``text``; the first begins at 0.
        text: all texts as UTF-8, one after the other.
    """

    keys: NDArray[np.uint64]
    score: NDArray[np.float64]
    correct: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    text_ends: NDArray[np.int64]
    text: bytes


class OutcomeIndex:
    """Numbers outcomes by arrival and finds them by key.

    Most keys lie in sorted arrays, which take 20 bytes a key where a dict takes 160; the newest lie in a dict until
    there are enough of them to be worth a sort.
    """

    def __init__(self) -> None:
        self._high = np.empty(0, np.uint64)
        self._low = np.empty(0, np.uint64)
        self._row = np.empty(0, np.uint32)
        self._unsorted: list[NDArray[np.uint64]] = []
        self._recent: dict[bytes, int] = {}
        self._score = array("d")
        self._correct = bytearray()
        self._tokens = array("q")
        self._text_end = array("q")
        self._text = bytearray()

    def __len__(self) -> int:
        return len(self._row) + len(self._recent)

    def __contains__(self, key: bytes) -> bool:
        return self._find(key) is not None

    def get(self, key: bytes) -> Outcome | None:
        """The outcome under a key, or None if there is none."""
        row = self._find(key)
        return None if row is None else self.outcome(row)

    def outcome(self, row: int) -> Outcome:
        """The outcome that arrived as number ``row``."""
        start = self._text_end[row - 1] if row else 0
        text = self._text[start : self._text_end[row]].decode()
        return Outcome(self._score[row], bool(self._correct[row]), text, self._tokens[row])

    def add(self, key: bytes, outcome: Outcome) -> None:
        """Adds one outcome, under a key that has none."""
        self._recent[key] = len(self._score)
        self._score.append(float(outcome.score))
        self._correct.append(bool(outcome.correct))
        self._tokens.append(int(outcome.tokens))
        self._text += outcome.text.encode()
        self._text_end.append(len(self._text))
        if len(self._recent) >= _MOST_RECENT:
            self._unsorted.append(np.frombuffer(b"".join(self._recent), ">u8").reshape(-1, 2))
            self._recent = {}
            self.sort()

    def extend(self, columns: Columns) -> None:
        """Adds a whole file, before anything is added singly; it is found after ``sort``."""
        base = len(self._text)
        self._unsorted.append(columns.keys)
        self._score.frombytes(columns.score.tobytes())
        self._correct += columns.correct.tobytes()
        self._tokens.frombytes(columns.tokens.tobytes())
        self._text += columns.text
        self._text_end.frombytes((columns.text_ends + base).tobytes())

    def sort(self) -> NDArray[np.int64]:
        """Makes what was added findable; of a key that occurs more than once the first arrival counts.

        Returns:
            ``[repeats, 2]``: for each arrival that does not count, the row that does and its own row.
        """
        first = len(self._score) - sum(map(len, self._unsorted))
        row = np.concatenate([self._row, np.arange(first, len(self._score), dtype=np.uint32)])
        high = np.concatenate([self._high, *(keys[:, 0] for keys in self._unsorted)], dtype=np.uint64)
        low = np.concatenate([self._low, *(keys[:, 1] for keys in self._unsorted)], dtype=np.uint64)
        self._unsorted = []
        order = np.lexsort((low, high))  # stable, so the first arrival of a key stays in front
        self._high, self._low, self._row = high[order], low[order], row[order]
        repeated = np.zeros(len(order), bool)
        repeated[1:] = (self._high[1:] == self._high[:-1]) & (self._low[1:] == self._low[:-1])
        if not repeated.any():
            return np.empty((0, 2), np.int64)
        front = np.maximum.accumulate(np.where(repeated, 0, np.arange(len(order))))
        repeats = np.column_stack((self._row[front[repeated]], self._row[repeated])).astype(np.int64)
        self._high, self._low, self._row = self._high[~repeated], self._low[~repeated], self._row[~repeated]
        return repeats

    def _find(self, key: bytes) -> int | None:
        recent = self._recent.get(key)
        if recent is not None:
            return recent
        high, low = int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big")
        at = int(self._high.searchsorted(np.uint64(high)))
        while at < len(self._high) and self._high[at] == high:
            if self._low[at] == low:
                return int(self._row[at])
            at += 1
        return None
