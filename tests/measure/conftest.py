from __future__ import annotations

from collections.abc import Iterator

import pytest

from cs_localize.measure.cluster import RaySession


@pytest.fixture(scope="package")
def local_ray() -> Iterator[None]:
    """One Ray for every test that asks for it; starting it takes seconds."""
    with RaySession():
        yield
