"""What every engine must do, whatever answers behind it. Call both checks from the engine's own tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, Head, ModelShape, Neuron
from cs_localize.measure.protocol import Engine, Request
from cs_localize.measure.spec import EngineSpec, load_engine
from cs_localize.outcomes import Outcome


def check_engine(engine: Engine, requests: Sequence[Request], tolerance: float = 1e-4) -> None:
    """Asserts the contract of ``Engine``.

    Args:
        engine: the engine.
        requests: unablated score requests for at least three different items.
            The engine must have measured means of heads.
        tolerance: most that a score may move between batches, in nats.
    """
    assert len({request.item for request in requests}) >= 3
    assert all(request.ablation.empty and request.mode == "score" for request in requests)
    assert isinstance(engine, Engine)
    assert engine.fingerprint
    assert engine.means
    requests = [replace(request, means=engine.means) for request in requests]
    assert engine.measure([]) == []
    baseline = engine.measure(requests)
    mixed = [replace(request, ablation=ablation) for request in requests for ablation in _ablations(engine.shape)]
    together = engine.measure(mixed)
    _check_scored(mixed, together)
    _check_same("asked again", together, engine.measure(mixed), tolerance)
    _check_any_order(engine, mixed, together, tolerance)
    _check_ablations_matter(baseline, mixed, together, tolerance)
    _check_every_kind_matters(engine, requests, baseline, tolerance)
    _check_unknown_units(engine, requests[0])
    _check_other_means(engine, requests[0])
    _check_generated(engine, requests)
    _check_same("the baseline after everything else", baseline, engine.measure(requests), tolerance)
    assert all(math.isfinite(value) for value in engine.evidence().values())


def check_refused_requests(engine: Engine, request: Request) -> None:
    """Asserts that an engine of a real model refuses, before it asks anything, what the model cannot be asked.

    Args:
        engine: the engine.
        request: one that it answers.
    """
    for change, message in (
        ({"prompt_ids": ()}, "has an empty prompt"),
        ({"answer_ids": ()}, "has an empty answer"),
        ({"answer_ids": (10**6,)}, "has token ids outside 0"),
        ({"prompt_ids": (-1,)}, "has token ids outside 0"),
        ({"prompt_ids": request.prompt_ids * 10**4}, "the model's context has room for"),
        ({"mode": "generate", "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"mode": "generate", "max_tokens": 10**6}, "the model's context has room for"),
    ):
        with pytest.raises(UsageError, match=message):
            engine.measure([request, replace(request, **change)])  # type: ignore[arg-type]


def check_refused_specs(spec: EngineSpec) -> None:
    """Asserts that a spec is refused by the name of the option that its engine lacks, before anything is loaded.

    Args:
        spec: one that loads.
    """
    for options in ("settings", "resources"):
        unknown = replace(spec, **{options: {**getattr(spec, options), "colour": 1}})
        with pytest.raises(UsageError, match=f"the {spec.name} engine has no option '?colour'?; it has "):
            load_engine(unknown)


def _ablations(shape: ModelShape) -> list[Ablation]:
    """The baseline, one head, one KV group, a whole layer, every head; heads scaled, replaced by means, and neurons."""
    last = Head(shape.layers - 1, shape.heads - 1)
    layer = [Head(last.layer, head) for head in range(shape.heads)]
    return [
        Ablation(),
        Ablation.of([Head(0, 0)]),
        Ablation.of(shape.kv_group(last)),
        Ablation.of(layer),
        Ablation.of(shape.all_heads()),
        *_kinds(shape).values(),
        Ablation(
            heads=((Head(0, 0), 0.5),),
            neurons=tuple((Neuron(last.layer, n), 2.0) for n in range(shape.ffn // 2)),
            mean_heads=(last,),
        ),
    ]


def _kinds(shape: ModelShape) -> dict[str, Ablation]:
    """One strong ablation of each kind."""
    # Every other head: where a norm follows the attention, scaling all of a layer by the same is undone.
    some = [head for head in shape.all_heads() if head.head % 2 == 0]
    return {
        "scaled": Ablation.of(some, scale=0.5),
        "replaced by their means": Ablation.to_mean(shape.all_heads()),
        "neurons": Ablation.of(neurons=(Neuron(layer, n) for layer in range(shape.layers) for n in range(shape.ffn))),
    }


def _check_scored(requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
    assert len(outcomes) == len(requests)
    for request, outcome in zip(requests, outcomes, strict=True):
        assert math.isfinite(outcome.score), f"{request.item.id} under {request.ablation} has score {outcome.score}"
        assert outcome.score <= 1e-6, "a log-probability is not positive"
        assert isinstance(outcome.correct, bool)
        assert outcome.text == "", "nothing is written when an answer is scored"
        assert outcome.tokens == len(request.prompt_ids) + len(request.answer_ids)


def _check_same(what: str, first: Sequence[Outcome], second: Sequence[Outcome], tolerance: float) -> None:
    moved = [abs(a.score - b.score) for a, b in zip(first, second, strict=True)]
    assert max(moved) <= tolerance, f"{what}: a score moved by {max(moved):.3g}, at most {tolerance:.3g}"


def _check_any_order(
    engine: Engine, requests: Sequence[Request], expected: Sequence[Outcome], tolerance: float
) -> None:
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = engine.measure([requests[i] for i in order])
    _check_same("in another order", [expected[i] for i in order], shuffled, tolerance)
    for i in order[:5]:
        _check_same("asked alone", [expected[i]], engine.measure([requests[i]]), tolerance)


def _check_ablations_matter(
    baseline: Sequence[Outcome], requests: Sequence[Request], outcomes: Sequence[Outcome], tolerance: float
) -> None:
    """Rows under the empty ablation equal the baseline though others were ablated beside them; some others do not."""
    unablated = [o for r, o in zip(requests, outcomes, strict=True) if r.ablation.empty]
    _check_same("unablated beside ablated", baseline, unablated, tolerance)
    score = {r.item: o.score for r, o in zip(requests, outcomes, strict=True) if r.ablation.empty}
    most = max(requests, key=lambda request: len(request.ablation.heads)).ablation
    damage = [abs(o.score - score[r.item]) for r, o in zip(requests, outcomes, strict=True) if r.ablation == most]
    assert max(damage) > 10 * tolerance, "no head off or every head off: the same scores"


def _check_every_kind_matters(
    engine: Engine, requests: Sequence[Request], baseline: Sequence[Outcome], tolerance: float
) -> None:
    """Every kind moves scores, and no two kinds are the same; the planted engine has no neurons that matter."""
    knockout = Ablation.of(engine.shape.all_heads())
    kinds = {**_kinds(engine.shape), "zeroed": knockout}
    scores = {"baseline": [outcome.score for outcome in baseline]}
    for name, ablation in kinds.items():
        asked = [replace(request, ablation=ablation) for request in requests]
        scores[name] = [outcome.score for outcome in engine.measure(asked)]
    if engine.fingerprint.startswith("planted"):
        assert scores.pop("neurons") == pytest.approx(scores["baseline"], abs=0.5)
        assert scores.pop("replaced by their means") == pytest.approx(scores["zeroed"], abs=0.5)
    for one, other in combinations(scores, 2):
        apart = max(abs(a - b) for a, b in zip(scores[one], scores[other], strict=True))
        assert apart > 10 * tolerance, f"{one} and {other}: the same scores"


def _check_other_means(engine: Engine, request: Request) -> None:
    ablation = Ablation.to_mean([Head(0, 0)])
    for means in ("", "0123456789abcdef"):
        with pytest.raises(UsageError, match="L0H0=mean' is asked with the means"):
            engine.measure([request, replace(request, ablation=ablation, means=means)])


def _check_unknown_units(engine: Engine, request: Request) -> None:
    shape = engine.shape
    unknown = [
        Ablation.of([Head(shape.layers, 0)]),
        Ablation.of([Head(0, shape.heads)]),
        Ablation.of(neurons=[Neuron(0, shape.ffn)]),
        Ablation.of(neurons=[Neuron(shape.layers, 0)]),
        Ablation.to_mean([Head(0, shape.heads)]),
    ]
    before = engine.evidence()
    for ablation in unknown:
        with pytest.raises(UsageError, match="out of range"):
            engine.measure([request, replace(request, ablation=ablation)])
    assert engine.evidence() == before, "something was asked although what was to be asked makes no sense"


def _check_generated(engine: Engine, requests: Sequence[Request]) -> None:
    """Both modes may come in one call."""
    limit = 4
    asked = [replace(request, mode="generate", max_tokens=limit) for request in requests]
    outcomes = engine.measure([*asked, *requests])
    assert len(outcomes) == len(asked) + len(requests)
    _check_scored(requests, outcomes[len(asked) :])
    for request, outcome in zip(asked, outcomes, strict=False):
        assert math.isnan(outcome.score), "a generated answer has no score"
        assert "\n" not in outcome.text
        assert not outcome.correct, "an engine does not know the task, so it does not grade"
        assert len(request.prompt_ids) < outcome.tokens <= len(request.prompt_ids) + limit
