"""A synthetic model with known heads: for tests, for planning and for load."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.measure.protocol import Request, check_ablation
from cs_localize.measure.spec import EngineSpec
from cs_localize.outcomes import Item, Outcome

VERSION = 1
"""Raised whenever an outcome for the same options and request may change."""


@dataclass(frozen=True)
class PlantedOptions:
    """What is planted. Sizes are in nats of log-probability lost when the head is knocked out.

    Attributes:
        tasks: tasks the engine can answer; each gets its own heads.
        seed: decides which heads, their exact sizes, and the items' difficulty.
        n_specific: heads that matter to one task alone, for each task.
        n_universal: heads of the first layers that matter to every task.
        strongest: size of a task's first specific head.
        decay: size of each further specific head relative to the one before.
        universal: size of the strongest universal head.
        background: scale of the small effect every head has on every task.
        variation: how much a head's effect differs from item to item (standard deviation of its logarithm).
        floor: no score falls below minus this, in nats.
        noise: standard deviation of the score's noise, in nats; that of bfloat16 by default.
        delay_s: seconds every call of ``measure`` sleeps; changes no outcome.
        universal_spread: how much a universal head's size differs from task to task (standard deviation of its
            logarithm).
        without: tasks that get no heads of their own, no backup and no group.
    """

    tasks: tuple[str, ...]
    seed: int = 0
    n_specific: int = 5
    n_universal: int = 5
    strongest: float = 3.0
    decay: float = 0.6
    universal: float = 3.0
    background: float = 0.12
    variation: float = 0.8
    floor: float = 10.0
    noise: float = 0.03
    delay_s: float = 0.0
    universal_spread: float = 0.2
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise UsageError("the planted engine needs a list of different 'tasks'")
        if self.n_specific < 1 or self.n_universal < 0:
            raise UsageError("the planted engine needs n_specific of at least 1 and n_universal of at least 0")
        if min(self.strongest, self.decay, self.floor) <= 0:
            raise UsageError("the planted engine needs strongest, decay and floor above 0")
        sizes = (self.universal, self.universal_spread, self.background, self.variation, self.noise, self.delay_s)
        if min(sizes) < 0:
            raise UsageError("the planted engine's sizes and delay_s must not be negative")
        if not set(self.without) <= set(self.tasks):
            raise UsageError("the planted engine's 'without' lists tasks that are not in 'tasks'")

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> PlantedOptions:
        """Reads plain JSON values.

        Raises:
            UsageError: on an unknown option, a value of another kind or out of range, or a missing list of tasks.
        """
        known = cls.__dataclass_fields__
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise UsageError(f"the planted engine has no option '{unknown[0]}'; it has {', '.join(known)}")
        lists = {"tasks": options.get("tasks"), "without": options.get("without", ())}
        for name, tasks in lists.items():
            if not isinstance(tasks, list | tuple) or not all(isinstance(task, str) for task in tasks):
                raise UsageError(f"the planted engine needs '{name}', a list of task names")
        for name, value in options.items():
            whole = isinstance(known[name].default, int)
            if name not in lists and (isinstance(value, bool) or not isinstance(value, int if whole else int | float)):
                raise UsageError(f"the planted engine's '{name}' must be a {'whole ' if whole else ''}number")
        return cls(**{**options, **{name: tuple(tasks or ()) for name, tasks in lists.items()}})


_LATER = {name: PlantedOptions.__dataclass_fields__[name].default for name in ("universal_spread", "without")}
"""Options that came after outcomes had been recorded: at these values they have no place in a fingerprint."""


@dataclass(frozen=True)
class _Plant:
    """Where everything is: ``effects[t, h]`` for single heads; the rest acts only together with another head."""

    universal: NDArray[np.int64]
    specific: NDArray[np.int64]
    backups: NDArray[np.int64]
    group: NDArray[np.int64]
    effects: NDArray[np.float64]


@dataclass(frozen=True)
class _Latent:
    """An item, the same under every mask: its ease, when it counts as correct, and its effects a head."""

    base: float
    threshold: float
    effects: list[float]
    scale: float


class PlantedEngine:
    """Answers from a formula in which the heads that matter are known. An ``Engine``.

    The log-probability of an item's answer is its latent ease minus the damage of every head knocked out: damage
    multiplies probabilities until a floor. On top of a quiet background there are universal heads; heads specific to
    a task; for each task a backup, which matters only as far as the strongest specific head is gone; and, for the
    first task by name, one KV group whose damage grows with the square of the share of it that is gone. A head scaled
    by ``s`` counts as knocked out by ``min(1, |1 - s|)``, one replaced by its mean as knocked out. Neurons have no
    effect.

    The noise is a function of the request alone, so order, batches and processes do not matter.
    """

    def __init__(self, shape: ModelShape, options: PlantedOptions) -> None:
        self.shape = shape
        self.means = ""
        self._options = options
        self._tasks = tuple(sorted(options.tasks))
        self._plant = _plant(shape, options)
        self._latents: dict[tuple[str, str], _Latent] = {}
        self._requests = 0
        self._closed = False
        settings = {
            name: value
            for name, value in asdict(options).items()
            if name != "delay_s" and not (name in _LATER and value == _LATER[name])
        }
        content = json.dumps({**settings, "tasks": self._tasks, "shape": asdict(shape)}, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        self.fingerprint = f"planted/{VERSION} seed={options.seed} {shape.layers}x{shape.heads} {digest}"

    @classmethod
    def from_options(cls, shape: ModelShape, options: Mapping[str, Any]) -> PlantedEngine:
        """Builds the engine from plain JSON values: the fields of ``PlantedOptions``.

        Raises:
            UsageError: on an unknown option, a missing list of tasks, or a model with too few heads.
        """
        return cls(shape, PlantedOptions.parse(options))

    @classmethod
    def from_spec(cls, spec: EngineSpec) -> PlantedEngine:
        """The engine of a spec: settings are options, and ``delay_s``, which changes no outcome, is a resource.

        Raises:
            UsageError: as ``from_options``.
        """
        engine = cls.from_options(spec.shape, {**spec.settings, **spec.resources})
        engine.fingerprint, engine.means = spec.fingerprint, spec.means
        return engine

    def measure(self, requests: Sequence[Request]) -> list[Outcome]:
        """Answers all requests, in their order.

        Raises:
            MeasurementError: if the engine was closed.
            UsageError: if an ablation names a head or neuron the model lacks, or an item a task that is not planted.
        """
        if self._closed:
            raise MeasurementError("the planted engine was closed and cannot measure")
        for request in requests:
            check_ablation(request, self.shape, self.means)
        time.sleep(self._options.delay_s)
        self._requests += len(requests)
        return [self._answer(request) for request in requests]

    def evidence(self) -> dict[str, float]:
        """Requests answered so far."""
        return {"requests": float(self._requests)}

    def close(self) -> None:
        """Ends the engine's life."""
        self._closed = True

    def truth(self, task: str) -> dict[Head, float]:
        """The heads specific to a task with their damage in nats, strongest first; a task may have none. For tests.

        Raises:
            UsageError: if the task is not planted.
        """
        row = self._row(task)
        if task in self._options.without:
            return {}
        effects = self._plant.effects[row]
        heads = sorted(self._plant.specific[row], key=lambda head: -effects[head])
        return {self.shape.head(head): float(effects[head]) for head in heads}

    def universal(self) -> tuple[Head, ...]:
        """The heads that matter to every task, in order of position. For tests."""
        return tuple(self.shape.head(h) for h in sorted(self._plant.universal))

    def backup(self, task: str) -> Head:
        """The head that matters to a task only once its strongest specific head is gone, if it has one. For tests."""
        return self.shape.head(self._plant.backups[self._row(task)])

    def group(self) -> tuple[Head, ...]:
        """The KV group that matters as a whole to the first task by name; empty in models without GQA. For tests."""
        return tuple(self.shape.head(h) for h in self._plant.group)

    def _row(self, task: str) -> int:
        if task not in self._tasks:
            raise UsageError(f"task '{task}' is not planted; planted are {', '.join(self._tasks)}")
        return self._tasks.index(task)

    def _answer(self, request: Request) -> Outcome:
        latent = self._latent(request.item)
        row = self._row(request.item.task)
        damage = self._damage(row, latent, request.ablation)
        floor = np.exp(-self._options.floor)
        score = np.log(floor + (1 - floor) * np.exp(min(latent.base - damage, 0.0)))
        score = min(float(score + self._noise(request)), 0.0)
        correct = score > latent.threshold
        tokens = len(request.prompt_ids) + len(request.answer_ids)
        if request.mode == "score":
            return Outcome(score=score, correct=correct, text="", tokens=tokens)
        return Outcome(float("nan"), False, request.item.answer if correct else "?", tokens)

    def _damage(self, row: int, latent: _Latent, ablation: Ablation) -> float:
        gone = {self.shape.index(head): min(1.0, abs(1.0 - scale)) for head, scale in ablation.heads}
        gone |= {self.shape.index(head): 1.0 for head in ablation.mean_heads}
        damage = sum(latent.effects[h] * share for h, share in gone.items())
        if self._tasks[row] in self._options.without:
            return damage
        primary, backup = int(self._plant.specific[row, 0]), int(self._plant.backups[row])
        size = self._options.strongest * latent.scale
        damage += 0.5 * size * gone.get(primary, 0.0) * gone.get(backup, 0.0)
        if row == 0 and len(self._plant.group):
            damage += size * (sum(gone.get(int(h), 0.0) for h in self._plant.group) / len(self._plant.group)) ** 2
        return damage

    def _latent(self, item: Item) -> _Latent:
        key = (item.task, item.id)
        if key not in self._latents:
            options = self._options
            rng = _generator("item", options.seed, item.task, item.id)
            base = -np.exp(rng.normal(-1.2, 0.9))
            threshold = -rng.uniform(0.7, 2.0)
            scale = np.exp(rng.normal(0.0, 0.3))
            factors = np.exp(rng.normal(-0.5 * options.variation**2, options.variation, self.shape.n_heads))
            effects = self._plant.effects[self._row(item.task)] * factors * scale
            self._latents[key] = _Latent(float(base), float(threshold), effects.tolist(), float(scale))
        return self._latents[key]

    def _noise(self, request: Request) -> float:
        digest = hashlib.sha256(f"{self._options.seed}|{request.key}".encode()).digest()
        uniform = (int.from_bytes(digest[:6]) + 0.5) / 2**48
        return self._options.noise * NormalDist().inv_cdf(uniform)


def _generator(*parts: object) -> np.random.Generator:
    """A generator that depends on the parts' text alone, in every process."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16]))


def _plant(shape: ModelShape, options: PlantedOptions) -> _Plant:
    rng = _generator("plant", options.seed, shape)
    tasks = len(options.tasks)
    width = shape.heads // shape.kv_heads
    early = max(1, shape.layers // 10) * shape.heads
    universal = rng.permutation(early)[: options.n_universal]
    start = early + width * int(rng.integers(max(1, (shape.n_heads - early) // width)))
    group = np.arange(start, start + width) if width > 1 else np.empty(0, dtype=np.int64)
    free = np.setdiff1d(np.arange(early, shape.n_heads), group)
    wanted = tasks * (options.n_specific + 1)
    if len(universal) < options.n_universal or len(free) < wanted:
        raise UsageError(
            f"{shape.n_heads} heads are too few to plant {options.n_universal} universal heads and "
            f"{options.n_specific} for each of {tasks} tasks; plant fewer"
        )
    chosen = rng.permutation(free)[:wanted].reshape(tasks, options.n_specific + 1)
    effects = rng.laplace(0.5 * options.background, options.background, (tasks, shape.n_heads))
    sizes = options.universal * options.decay ** (0.5 * np.arange(options.n_universal))
    effects[:, universal] += sizes * np.exp(rng.normal(0.0, options.universal_spread, (tasks, options.n_universal)))
    for row, (task, heads) in enumerate(zip(sorted(options.tasks), chosen, strict=True)):
        if task not in options.without:
            effects[row, heads[:-1]] += options.strongest * options.decay ** np.arange(options.n_specific)
    return _Plant(universal, chosen[:, :-1], chosen[:, -1], group, effects)
