"""How far two engines agree, and what an engine's own noise is: the evidence that a knockout is the right knockout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec, load_engine
from cs_localize.outcomes import Outcome


@dataclass(frozen=True)
class Agreement:
    """Two sets of outcomes for the same requests.

    Attributes:
        same_token: share of generated requests with the same first token.
        score_difference: mean absolute difference of the answer's log-probability, in nats.
        requests: requests compared.
    """

    same_token: float
    score_difference: float
    requests: int


def proof_requests(scored: Sequence[Request], ablations: Sequence[Ablation]) -> list[Request]:
    """Every ablation on some items, as a score and as one generated token.

    Args:
        scored: requests of the items under any ablation; they are cycled through.
        ablations: each gets ``len(scored) / len(ablations)`` items, at least one.
    """
    each = max(1, len(scored) // len(ablations))
    requests = []
    for number, ablation in enumerate(ablations):
        for i in range(each):
            request = replace(scored[(number * each + i) % len(scored)], ablation=ablation)
            requests += [request, replace(request, mode="generate", max_tokens=1)]
    return requests


def random_ablations(
    shape: ModelShape, count: int, heads: int, rng: np.random.Generator, each_holds: Sequence[Head] = ()
) -> list[Ablation]:
    """Ablations of random heads, each holding one of the given heads, taken in turn."""
    ablations = []
    for number in range(count):
        drawn = {shape.head(int(i)) for i in rng.choice(shape.n_heads, size=min(heads, shape.n_heads), replace=False)}
        if each_holds:
            drawn.add(each_holds[number % len(each_holds)])
        ablations.append(Ablation.of(drawn))
    return ablations


def agreement(first: Sequence[Outcome], second: Sequence[Outcome]) -> Agreement:
    """Compares outcomes of ``proof_requests``, request by request.

    Raises:
        UsageError: if the two differ in length or hold no scores.
    """
    if len(first) != len(second) or not first:
        raise UsageError(f"{len(first)} outcomes cannot be compared with {len(second)}")
    scores = np.array([(a.score, b.score) for a, b in zip(first, second, strict=True)])
    scored = ~np.isnan(scores).any(axis=1)
    if not scored.any():
        raise UsageError("there are no scores to compare")
    texts = [a.text == b.text for a, b, s in zip(first, second, scored, strict=True) if not s]
    return Agreement(
        same_token=float(np.mean(texts)) if texts else float("nan"),
        score_difference=float(np.abs(scores[scored, 0] - scores[scored, 1]).mean()),
        requests=len(first),
    )


def answer_in_process(
    spec: EngineSpec, batches: Sequence[Sequence[Request]]
) -> tuple[list[list[Outcome]], list[dict[str, float]]]:
    """Loads an engine and answers some batches one after the other. For ``run_on_worker``.

    Returns:
        The outcomes of every batch, and the engine's evidence after each.
    """
    engine = load_engine(spec)
    try:
        found = [(engine.measure(batch), engine.evidence()) for batch in batches]
        return [outcomes for outcomes, _ in found], [evidence for _, evidence in found]
    finally:
        engine.close()


def stock_answers(spec: EngineSpec, requests: Sequence[Request]) -> list[Outcome]:
    """What vLLM generates with the spec's options, without this package's worker. For ``run_on_worker``."""
    from cs_localize.measure.vllm.engine import _bind_ranks

    ranks = int(spec.resources.get("tensor_parallel", 1))
    _bind_ranks(ranks)  # before vLLM is imported, and as for our own engine
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    options: dict[str, Any] = {
        "model": spec.model_dir,
        "dtype": spec.dtype,
        "trust_remote_code": bool(spec.settings.get("trust_remote_code", False)),
        "model_impl": str(spec.settings.get("model_impl", "auto")),
        "enforce_eager": bool(spec.resources.get("eager", True)),
        "tensor_parallel_size": ranks,
        "gpu_memory_utilization": float(spec.resources.get("gpu_memory_utilization", 0.9)),
        "disable_log_stats": True,
    }
    if ranks > 1:
        options["distributed_executor_backend"] = "mp"  # Ray would want a second place for what a worker has already
    llm = LLM(**options)
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in requests],
        [SamplingParams(temperature=0, max_tokens=r.max_tokens, stop=list(r.stop)) for r in requests],
        use_tqdm=False,
    )
    completions = [output.outputs[0] for output in outputs]
    return [
        Outcome(math.nan, False, completion.text, len(request.prompt_ids) + len(completion.token_ids))
        for request, completion in zip(requests, completions, strict=True)
    ]
