"""Scores a given answer without generating one: its tokens are forced, their raw log-probabilities read.

One short decode step an answer token, with prefix-cache reads, through vLLM's public logits-processor interface. Asking
for prompt log-probabilities instead would compute the vocabulary for every prompt token and turn the prefix cache off.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class ForceGold(AdapterLogitsProcessor):
    """Makes greedy sampling return ``extra_args['gold']``, token by token, where a request carries it.

    vLLM computes raw log-probabilities before logits processors run, so they are the model's own.
    """

    def is_argmax_invariant(self) -> bool:
        """It exists to change the argmax."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """The processor of one request, or None for a request that generates freely."""
        gold = (params.extra_args or {}).get("gold")
        if gold is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[gold[len(output_ids)]] = torch.finfo(logits.dtype).max
            return logits

        return force
