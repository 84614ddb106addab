"""Scores a given answer from one prefill, without generating it and without the vocabulary for every prompt token.

The prompt is sent with all tokens of the answer but the last behind it. The rows that predict those are the only ones
of the prompt whose log-probabilities are computed (``answer_rows``). The last token is forced where vLLM samples one in
any case (``ForceGold``), so that an answer of one token costs no more rows than generating it. vLLM's own prompt
log-probabilities would compute the vocabulary for every prompt token and turn reads of the prefix cache off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


def gold_of(params: SamplingParams | None) -> list[int] | None:
    """Tokens of the answer that a request scores, or None of a request that scores none."""
    gold = (params.extra_args or {}).get("gold") if params is not None else None
    return gold if isinstance(gold, list) and gold else None


class ForceGold(AdapterLogitsProcessor):
    """Makes sampling return the last token of ``extra_args['gold']``, where a request carries it.

    vLLM computes raw log-probabilities before logits processors run, so they are the model's own.
    """

    def is_argmax_invariant(self) -> bool:
        """It exists to change the argmax."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """The processor of one request, or None for a request that generates freely."""
        gold = gold_of(params)
        if gold is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[gold[-1]] = torch.finfo(logits.dtype).max
            return logits

        return force


def answer_rows(
    runner: Any,  # noqa: ANN401  # vLLM's V1 runner, whose types are loose
    golds: Mapping[str, Sequence[int]],
    hidden_states: torch.Tensor,
    num_scheduled_tokens: Mapping[str, int],
) -> dict[str, LogprobsTensors]:
    """Log-probabilities of the tokens of answers that this step predicts, but those of every last one.

    Positions that the prefix cache served have no row; their log-probabilities stay NaN. A request that was cut into
    chunks or preempted is completed step by step.

    Args:
        runner: which runs the step.
        golds: the answer of every request that scores one of several tokens.
        hidden_states: of all token rows of the step.
        num_scheduled_tokens: tokens of every request in the step.

    Returns:
        ``[answer tokens - 1, 1]`` of every request whose prompt ends in this step.
    """
    complete: dict[str, LogprobsTensors] = {}
    rows, tokens, places = [], [], []
    for req_id, gold in golds.items():
        if req_id not in num_scheduled_tokens:
            continue  # preempted
        request = runner.requests[req_id]
        found = request.in_progress_prompt_logprobs_cpu
        if found is None:
            found = LogprobsTensors.empty_cpu(len(gold) - 1, 1)
            found.logprob_token_ids[:, 0] = torch.tensor(gold[:-1])
            found.logprobs.fill_(math.nan)
            found.selected_token_ranks.zero_()
            request.in_progress_prompt_logprobs_cpu = found
        start = request.num_computed_tokens
        stop = start + num_scheduled_tokens[req_id]
        length = len(request.prompt_token_ids)
        first = length - len(gold)  # the row that predicts the answer's first token
        begin, end = max(first, start), min(stop, length - 1)
        if begin < end:
            offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[req_id]]) - start
            rows.append(np.arange(begin, end) + offset)
            tokens.append(np.array(gold[begin - first : end - first]))
            places.append((found, slice(begin - first, end - first)))
        if stop >= length:
            complete[req_id] = found
            request.in_progress_prompt_logprobs_cpu = None
    if places:
        logprobs, ranks = _predicted(runner, hidden_states, np.concatenate(rows), np.concatenate(tokens))
        sizes = [len(one) for one in rows]
        for (found, place), values, order in zip(
            places, torch.split(logprobs, sizes), torch.split(ranks, sizes), strict=True
        ):
            found.logprobs[place] = values
            found.selected_token_ranks[place] = order
    return complete


def _predicted(
    runner: Any,  # noqa: ANN401
    hidden_states: torch.Tensor,
    rows: np.ndarray[Any, np.dtype[np.int64]],
    tokens: np.ndarray[Any, np.dtype[np.int64]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability ``[rows, 1]`` and the rank ``[rows]`` of a token at every row, on the CPU.

    As many rows at a time as vLLM has set memory aside for: those of a full batch's sampled tokens.
    """
    at_once = runner.scheduler_config.max_num_seqs
    parts = []
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        chosen, targets = (torch.from_numpy(one[part]).to(hidden_states.device) for one in (rows, tokens))
        logprobs = runner.sampler.compute_logprobs(runner.model.compute_logits(hidden_states[chosen]))
        _, values, ranks, *_ = runner.sampler.gather_logprobs(logprobs, 0, targets)
        parts.append((values.cpu(), ranks.cpu()))
    return torch.cat([values for values, _ in parts]), torch.cat([ranks for _, ranks in parts])
