"""The engine in this process, outside a study: what an ablation takes from an answer, and what the model writes then.

python examples/engine.py [MODEL]
"""

from __future__ import annotations

import sys

from cs_localize import Engine, Item

ITEM = Item("antonyms", "up", "hot -> cold\nbig -> small\nfast -> slow\nup ->", " down", max_tokens=8)
ABLATIONS: tuple[list[str], ...] = ([], ["L0H0"], ["L0"], ["L0H0=0.5", "L1H2"], ["L0H0=mean"], [])


def main(model: str) -> None:
    """Asks one item under every ablation, all in one batch, and prints one line each."""
    items = [ITEM] * len(ABLATIONS)
    with Engine(model, mean_items=[ITEM]) as engine:
        intact = engine.score([ITEM])[0].score
        scored = engine.score(items, ABLATIONS)
        written = engine.generate(items, ABLATIONS)
    for heads, answer, text in zip(ABLATIONS, scored, written, strict=True):
        print(f"{','.join(heads) or 'none':<16} {answer.score - intact:+8.3f} nats  {text.text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct")
