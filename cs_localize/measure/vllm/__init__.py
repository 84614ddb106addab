"""The vLLM engine: a different ablation for every request of one continuous batch.

Reading order: ``table`` (what is scaled, and the op that does it), ``worker`` (where it sits inside vLLM), ``gold``
(how an answer is scored), ``engine`` (requests in, outcomes out, and the proof). ``means`` belongs to the table,
``options`` and ``start`` to the worker: what vLLM is started with, and what is refused before. ``middleware`` is the
server's. What it runs, how, and how it is known to be right: docs/engine.md.
"""

from cs_localize.measure.vllm.engine import VLLMEngine

__all__ = ["VLLMEngine"]
