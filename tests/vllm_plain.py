"""Scores from vLLM as anyone runs it, without a word of this package's engine; called in a process of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec


def plain_scores(spec: EngineSpec, requests: Sequence[Request]) -> list[float]:
    """Log-probability of each answer, read from vLLM's prompt log-probabilities."""
    from vllm import LLM, SamplingParams

    eager = bool(spec.resources.get("eager", True))
    llm = LLM(model=spec.model_dir, dtype=spec.dtype, enforce_eager=eager, max_num_seqs=16, disable_log_stats=True)
    prompts = [{"prompt_token_ids": [*request.prompt_ids, *request.answer_ids]} for request in requests]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    scores = []
    for request, output in zip(requests, outputs, strict=True):
        steps = output.prompt_logprobs[len(request.prompt_ids) :]
        scores.append(math.fsum(step[token].logprob for step, token in zip(steps, request.answer_ids, strict=True)))
    return scores
