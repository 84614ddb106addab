"""The Ray that workers run on, a local one or a cluster that is already there, and what its errors mean."""

from __future__ import annotations

import importlib
import logging
import math
import os
import signal
import socket
import threading
import uuid
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cs_localize.errors import CsLocalizeError, MeasurementError, UsageError, one_line
from cs_localize.measure.sockets import check_ray_sockets
from cs_localize.measure.spec import EngineSpec

if TYPE_CHECKING:
    from ray.exceptions import RayError, RayTaskError
    from ray.util.placement_group import PlacementGroup

_OBJECT_STORE_BYTES = 128 * 2**20
"""Units and outcomes are small; Ray's own default would reserve a third of the memory."""

_KNOCK_S = 5.0
_PLACE = "cs_localize-worker-"


class RaySession:
    """A connection to Ray for the time of a ``with`` block.

    An address, or ``RAY_ADDRESS`` as it is set within a Ray job, means the cluster there. Otherwise a Ray of our own is
    started on this machine, reachable from this machine alone, and ended with the block. Where the process is connected
    already, that connection is used and left alone, so sessions may be nested.

    Args:
        address: a running cluster, ``auto`` for the one of this machine.

    Raises:
        UsageError: on entering, if there is no cluster at the address, or the path of the temporary folder is too long
            for the sockets of a Ray of our own.
        CsLocalizeError: if none can be started on this machine.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or None
        self._owned = False

    def __enter__(self) -> RaySession:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if self._address is None:
            # Ray, which asks no password, then listens on the loopback interface alone; read when Ray is imported.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        if ray.is_initialized():
            return self
        terminate = signal.getsignal(signal.SIGTERM)
        if self._address is None:
            check_ray_sockets()
            try:
                ray.init(
                    address="local",
                    num_cpus=len(os.sched_getaffinity(0)),
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address="127.0.0.1",
                )
            except Exception as error:  # Ray raises just that where the machine is too busy, or its disk full
                raise CsLocalizeError(f"Ray does not start on this machine ({one_line(error)}); run again") from error
        else:
            try:
                _knock(self._address)
                ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UsageError(
                    f"no Ray cluster answers at '{self._address}' ({one_line(error)}); "
                    "unset RAY_ADDRESS to run on this machine"
                ) from None
        self._owned = True
        if callable(terminate) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)  # Ray has put its own in place, which prints a stack and exits
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned:
            import ray

            self._owned = False
            ray.shutdown()


def _knock(address: str) -> None:
    """Raises ConnectionError if nothing listens at a ``host:port``; Ray would try again and again for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    names = [host.strip("[]")]
    if names[0] in ("127.0.0.1", "localhost", "::1"):
        # Ray takes the loopback address for this machine, where a cluster may listen at another of its addresses.
        names.append(str(importlib.import_module("ray").util.get_node_ip_address()))
    reason = ""
    for name in names:
        try:
            socket.create_connection((name, int(port)), timeout=_KNOCK_S).close()
        except (OSError, OverflowError) as error:
            reason = str(error)
        else:
            return
    raise ConnectionError(reason)


def worker_environment(spec: EngineSpec, threads: int) -> dict[str, str]:
    """Environment of a worker's process; set before it starts, since torch and vLLM read it on import."""
    return {
        "HF_HUB_OFFLINE": "1",
        "MKL_NUM_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": str(spec.resources.get("kv_cache_gib", 1)),
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }


def count_room(threads: int, gpus: float) -> int:
    """How many workers the connected cluster could hold if nothing else ran on it."""
    return sum(_room(resources, threads, gpus) for resources in _machines())


def check_room(threads: int, gpus: float) -> None:
    """Raises UsageError if the connected cluster could not hold a single worker even when nothing else ran on it."""
    if not count_room(threads, gpus):
        have = "; ".join(map(_resources, _machines()))
        raise UsageError(
            f"a worker asks for {_wanted(threads, gpus)}, which no machine of the cluster has (machines: {have}); set "
            "engine.threads lower"
        )


def ask_place(threads: int, gpus: float) -> PlacementGroup:
    """Asks for a place for one worker; Ray gives it on the machine with the largest share of its cores free."""
    from ray.util import placement_group

    bundle = {"CPU": float(threads), "GPU": float(gpus)} if gpus else {"CPU": float(threads)}
    place: PlacementGroup = placement_group([bundle], name=_PLACE + uuid.uuid4().hex)  # Ray wants every name once
    return place


def waiting_places() -> set[str]:
    """The ids of all places that fleets of the cluster, of this driver or others, have asked for and not got yet."""
    from ray.util import placement_group_table

    return {
        name
        for name, place in placement_group_table().items()
        if place["name"].startswith(_PLACE) and place["state"] == "PENDING"
    }


def describe_shortage(threads: int, gpus: float) -> str:
    """What a worker waits for and what the cluster has free, for messages."""
    ray: Any = importlib.import_module("ray")
    return f"each asks for {_wanted(threads, gpus)}; free in the cluster now: {_resources(ray.available_resources())}"


def engine_error(error: RayTaskError, engine: str) -> CsLocalizeError:
    """What an engine raised in its worker, as if it had been raised here, in one line."""
    cause = error.cause
    if isinstance(cause, CsLocalizeError):
        return type(cause)(one_line(cause))
    return MeasurementError(f"the {engine} engine failed: {type(cause).__name__}: {one_line(cause)}")


def death_reason(error: RayError) -> str:
    """Why a worker died, in one line; Ray takes many, of which the detail of the exit says most."""
    *_, detail = " ".join(str(error).split()).rpartition("Worker exit detail: ")
    return f"{type(error).__name__}: {one_line(detail)}"


def _machines() -> list[dict[str, float]]:
    ray: Any = importlib.import_module("ray")  # its inspection calls carry no types
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _room(resources: dict[str, float], threads: int, gpus: float) -> int:
    by_cores = math.floor(resources.get("CPU", 0) / threads)
    return by_cores if not gpus else min(by_cores, math.floor(resources.get("GPU", 0) / gpus))


def _wanted(threads: int, gpus: float) -> str:
    cores = f"{threads} core{'s' if threads > 1 else ''}"
    return f"{cores} and {gpus:g} GPU" if gpus else cores


def _resources(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} cores, {resources.get('GPU', 0):g} GPUs"
