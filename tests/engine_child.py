"""What the test of the public engine runs in a process of its own, as a user's script would: it prints JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from cs_localize import Ablation, Engine, EngineConfig, Head, Item
from cs_localize.errors import CsLocalizeError, MeasurementError

ITEMS = [
    Item("letters", "1", "abc def", " gh"),
    Item("letters", "2", "hello wor", "ld"),
    Item("letters", "3", "12 34 56", " 78"),
]
CHANGED = (["L0H1", "L1H2=0.5"], [], Ablation.of([Head(0, 3)]))
REPLACED = ["L0H1", "L1H2=0.5", "L0H0=mean"]


def message_of(engine: Engine, ablation: list[str]) -> str:
    """What asking for an ablation raises."""
    try:
        engine.score(ITEMS, ablation)
    except CsLocalizeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def answers(engine: Engine) -> dict[str, Any]:
    """The same questions for every engine."""
    return {
        "plain": [outcome.score for outcome in engine.score(ITEMS)],
        "changed": [outcome.score for outcome in engine.score(ITEMS, CHANGED)],
        "replaced": [outcome.score for outcome in engine.score(ITEMS, REPLACED)],
        "text": [outcome.text for outcome in engine.generate(ITEMS, CHANGED, max_tokens=4)],
        "tokens": [outcome.tokens for outcome in engine.generate(ITEMS, max_tokens=4)],
        "unknown": message_of(engine, ["L9H1"]),
    }


def off(engine: Any) -> str:  # noqa: ANN401  # a private look inside
    """What an engine says whose canary is off."""
    inner = engine._worker._engine
    (canary, expected), ablated = inner._canaries
    inner._canaries = ((canary, expected + abs(expected - ablated[1]) / 3), ablated)
    try:
        engine.score(ITEMS)
    except MeasurementError as error:
        return str(error)
    return ""


def main(model: str) -> None:
    """Opens vLLM, transformers and vLLM again, one after another."""
    before = dict(os.environ), os.sched_getaffinity(0)
    printed: dict[str, Any] = {}
    for name in ("vllm", "hf", "again"):
        config = EngineConfig(name="hf" if name == "hf" else "vllm", dtype="float32", threads=1, unit_tokens=20)
        with Engine(model, engine=config, mean_items=ITEMS) as engine:
            printed[name] = answers(engine)
            printed[name]["evidence"] = engine.evidence()
            if name == "again":
                printed["off"] = off(engine)
    printed["restored"] = before == (dict(os.environ), os.sched_getaffinity(0))
    print(json.dumps(printed))


if __name__ == "__main__":
    main(sys.argv[1])
