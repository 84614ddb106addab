"""The vLLM engine: a different ablation for every request of one continuous batch.

Reading order: ``table`` (what is scaled, and the op that does it), ``worker`` (where it sits inside vLLM), ``gold``
(how an answer is scored), ``engine`` (requests in, outcomes out, and the proof).
"""

from cs_localize.measure.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
