from __future__ import annotations

from collections.abc import Iterator

import pytest

from cs_localize.measure.cluster import RaySession


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """One Ray for every study that a file runs in this process; starting it takes seconds."""
    with RaySession():
        yield
