from __future__ import annotations

from cs_localize.seeds import stream


def test_streams_differ_by_name_and_repeat_by_seed() -> None:
    draws = [stream(seed, *names).random() for seed, *names in ((1, "a"), (1, "b"), (2, "a"), (1, "a", "b"))]
    assert len(set(draws)) == 4
    assert stream(1, "a").random() == draws[0]
