"""What vLLM must be started with for its workers to ablate: read by this package's engine, ``LLM`` and the server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cs_localize.errors import MeasurementError
from cs_localize.heads import ModelShape

WORKER = "cs_localize.measure.vllm.worker.KnockoutWorker"


def worker_options(
    shape: ModelShape, neuron_slots: int = 0, *, means: bool = False, salted: bool = False, verified: bool = False
) -> dict[str, Any]:
    """Our worker class, and what it is told of its work.

    Args:
        shape: geometry of the model.
        neuron_slots: most different neuron ablations in one step; 0 for as many as a step holds requests.
        means: whether means of heads will be measured.
        salted: whether every request carries its ablation's key as a cache salt; without it the worker refuses to
            start with a prefix cache.
        verified: whether the worker checks its counters after every step, for callers that do not ask for evidence.
    """
    from cs_localize.measure.vllm.table import SOURCE_HASH

    return {
        "worker_cls": WORKER,
        "additional_config": {
            "knockout_source": SOURCE_HASH,
            "knockout_neuron_slots": neuron_slots,
            "knockout_shape": asdict(shape),
            "knockout_means": means,
            "knockout_salted": salted,
            "knockout_verified": verified,
        },
    }


def read_options(additional_config: object, prefix_cache: bool) -> dict[str, Any]:
    """What a worker was told, checked.

    Raises:
        MeasurementError: if it was started without the options above, or with a prefix cache that nothing keeps apart.
    """
    if not isinstance(additional_config, dict) or "knockout_shape" not in additional_config:
        raise MeasurementError(f"{WORKER} was started without its options; see cs_localize.serving.llm_options")
    if prefix_cache and not additional_config["knockout_salted"]:
        raise MeasurementError(
            "requests under different ablations would share a prefix cache; set enable_prefix_caching=False"
        )
    return additional_config
