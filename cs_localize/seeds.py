"""Random numbers from a study's seed."""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, *purpose: str) -> np.random.Generator:
    """A generator of its own for every purpose, so that what one purpose draws leaves the others alone.

    Args:
        seed: the study's seed.
        purpose: what the numbers are for.
    """
    digest = hashlib.sha256("|".join((str(seed), *purpose)).encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))
