"""A tiny engine for tests of the fleet and the ledger: quick, deterministic, and it misbehaves where it is told to."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.tokens import WordEncoder
from cs_localize.measure.worker import CoresTaken
from cs_localize.outcomes import Item, Outcome

SHAPE = ModelShape(layers=4, heads=8, kv_heads=4, head_dim=4, ffn=16)


class ToyEngine:
    """Scores are a hash of the request; ``text`` names the process that answered.

    Resources: ``delay_s`` for each call; ``log``, a file that gets the key of every request measured. An item called
    ``poison`` kills the process, ``hang`` never comes back, ``wrong`` raises MeasurementError, ``bug`` raises
    ZeroDivisionError, ``short`` makes the engine return one outcome too few and ``nan`` a score that is not a number.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.shape = spec.shape
        self.fingerprint = spec.fingerprint
        self.means = spec.means
        self._delay_s = float(spec.resources.get("delay_s", 0.0))
        self._log = spec.resources.get("log")
        self._calls = 0
        self._torch_came_first = float("torch" in sys.modules)

    def measure(self, requests: Sequence[Request]) -> list[Outcome]:
        self._calls += 1
        time.sleep(self._delay_s)
        names = {request.item.id for request in requests}
        if "poison" in names:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang" in names:
            time.sleep(3600)
        if "wrong" in names:
            raise MeasurementError("the canary is off")
        if "bug" in names:
            raise ZeroDivisionError("a bug\nover two lines")
        if self._log is not None:
            with Path(self._log).open("a") as file:
                file.write("".join(f"{request.key}\n" for request in requests))
        outcomes = [toy_outcome(request, str(os.getpid())) for request in requests]
        return outcomes[1:] if "short" in names else outcomes

    def evidence(self) -> dict[str, float]:
        return {
            "calls": float(self._calls),
            "pid": float(os.getpid()),
            "torch_came_first": self._torch_came_first,
            "threads": float(os.environ["OMP_NUM_THREADS"]),
        }

    def close(self) -> None:
        """Nothing to release."""


def toy_outcome(request: Request, text: str = "") -> Outcome:
    """What ``ToyEngine`` answers."""
    if request.item.id == "nan":
        return Outcome(float("nan"), False, text, 1)
    digest = hashlib.sha256(request.key.encode()).digest()
    tokens = len(request.prompt_ids) + len(request.answer_ids)
    return Outcome(-int.from_bytes(digest[:4], "big") / 2**28, digest[4] % 2 == 0, text, tokens)


def load_toy(spec: EngineSpec) -> ToyEngine:
    """The loader that works."""
    return ToyEngine(spec)


def load_nothing(spec: EngineSpec) -> ToyEngine:
    """A loader whose model does not exist."""
    raise UsageError("there is no such model")


def load_another(spec: EngineSpec) -> ToyEngine:
    """A loader that makes another engine than the one asked for."""
    engine = ToyEngine(spec)
    engine.fingerprint = "another"
    return engine


def load_and_die(spec: EngineSpec) -> ToyEngine:
    """A loader whose process is killed, as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    return ToyEngine(spec)


def load_where_cores_are(folder: Path, spec: EngineSpec) -> ToyEngine:
    """A loader that works for the first worker alone; the others find no cores, once there is a file ``waited``."""
    try:
        (folder / "taken").mkdir()
    except FileExistsError:
        while not (folder / "waited").exists():
            time.sleep(0.01)
        raise CoresTaken("a worker asks for 1 cores, but others use them") from None
    return ToyEngine(spec)


def load_for_ever(spec: EngineSpec) -> ToyEngine:
    """A loader that never comes back."""
    time.sleep(3600)
    return ToyEngine(spec)


def toy_spec(**resources: object) -> EngineSpec:
    """A spec of the toy engine; resources do not change the fingerprint."""
    return EngineSpec("planted", "", "toy", SHAPE, resources=resources)


def toy_item(number: int | str) -> Item:
    """One item; a word instead of a number is one that ``ToyEngine`` misbehaves on."""
    return Item("toy", str(number), f"question {number} is", f" answer {number}")


def toy_requests(n: int, first: int = 0) -> list[Request]:
    """``n`` different requests of six tokens each: four items under ever new ablations."""
    encoder = WordEncoder()
    requests = []
    for number in range(first, first + n):
        item = toy_item(number % 4)
        heads = [Head(layer, number // 8**layer % 8) for layer in range(4)]
        requests.append(Request(item, *encoder.encode(item), Ablation.of(heads)))
    return requests


def toy_request(name: str) -> Request:
    """The unablated request for one item, such as ``poison``."""
    item = toy_item(name)
    return Request(item, *WordEncoder().encode(item), Ablation())
