"""One call in a process of its own on the connected Ray, with an engine's environment and cores."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from cs_localize.errors import MeasurementError
from cs_localize.measure.cluster import check_room, death_reason, engine_error, worker_environment
from cs_localize.measure.spec import EngineSpec

ResultT = TypeVar("ResultT")


def run_on_worker(
    function: Callable[..., ResultT], spec: EngineSpec, *args: object, cores: int, gpus: float = 0, **options: object
) -> ResultT:
    """Runs ``function(spec, *args, **options)`` in a process of its own on the connected Ray, with so many cores.

    Raises:
        UsageError: if no machine of the cluster has so many cores and GPUs.
        CsLocalizeError: what the function raised, or a MeasurementError in one line for anything else.
    """
    check_room(cores, gpus)
    ray: Any = importlib.import_module("ray")
    task = ray.remote(
        num_cpus=cores,
        num_gpus=gpus,
        max_calls=1,  # the process ends with the call: vLLM allows one engine a process and frees its memory no earlier
        max_retries=1,
        runtime_env={"env_vars": worker_environment(spec, cores)},
    )(function)
    try:
        result: ResultT = ray.get(task.remote(spec, *args, **options))
    except ray.exceptions.RayTaskError as error:
        raise engine_error(error, spec.name) from error
    except ray.exceptions.RayError as error:
        raise MeasurementError(f"the process of {function.__name__} died: {death_reason(error)}") from error
    return result
