from __future__ import annotations

from types import SimpleNamespace

import pytest

from cs_localize.heads import ModelShape
from cs_localize.measure import crew
from cs_localize.measure.spec import EngineSpec, load_engine

SHAPE = ModelShape(layers=1, heads=2, kv_heads=1, head_dim=4, ffn=8)


def test_a_crew_larger_than_the_room_that_is_left_hires_nobody_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    room = [3]
    monkeypatch.setattr(crew, "count_room", lambda threads, gpus: room[0])
    monkeypatch.setattr(crew, "WorkerHandle", lambda number, *_: SimpleNamespace(number=number))
    spec = EngineSpec("planted", "", "", SHAPE)
    hired = crew.Crew(4, spec, 1, 0, load_engine, 60.0, lambda kind, **fields: None)
    hired.hire(10)
    assert [worker.number for worker in hired] == [0, 1, 2]

    room[0] = 1
    monkeypatch.setattr(hired, "_next_look", 0.0)
    hired.hire(10)

    assert [worker.number for worker in hired] == [0, 1, 2]
