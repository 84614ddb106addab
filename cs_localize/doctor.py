"""Checks an installation, and proves on the user's own model that ablations take effect."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from cs_localize.config import EngineConfig, parse_study
from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.heads import Ablation, ModelShape, Neuron
from cs_localize.measure.cluster import RaySession
from cs_localize.measure.proof import (
    Agreement,
    agreement,
    answer_in_process,
    proof_requests,
    random_ablations,
    stock_answers,
)
from cs_localize.measure.protocol import Request
from cs_localize.measure.remote import run_on_worker
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.vllm.start import check_version
from cs_localize.models import home
from cs_localize.options import apply_overrides, dump_options
from cs_localize.outcomes import Outcome
from cs_localize.sandbox import unavailable
from cs_localize.seeds import stream
from cs_localize.session import engine_spec, fleet_size, package_versions
from cs_localize.tasks import get_task

_LEAST_FREE_GIB = 2
_ABLATIONS = 16
_FREE_TOKENS = 8
_PREFIX_TOKENS = 128  # four blocks of the engine's cache, of which the answer takes a part
_SAME_TOKEN = 0.95
_SCORE_DIFFERENCE = 0.05  # nats between two runs of one engine in the dtype of a study
_EXACT_DIFFERENCE = 0.01  # nats between two engines in float32


def read_engine(overrides: tuple[str, ...]) -> EngineConfig:
    """The engine to prove, as ``engine.KEY=VALUE`` overrides of a study's say.

    Raises:
        UsageError: if an override is malformed, is none of the engine's, or asks for what the doctor does not prove.
    """
    options = apply_overrides({}, overrides)
    for override in overrides:
        if re.split("[.=]", override)[0] != "engine":
            raise UsageError(
                f"--set {override}: the doctor has options of the engine alone, such as engine.eager=false"
            )
    engine = parse_study({"model": "any", "tasks": ["any"], **options}, "doctor").engine
    if engine.name != "vllm":
        raise UsageError(f"engine.name {engine.name}: what the doctor proves is the engine vllm; leave it out")
    if engine.workers not in (None, 1):
        raise UsageError(f"engine.workers {engine.workers}: the doctor starts one engine at a time; leave it out")
    return engine


def diagnose(model: str, stream: TextIO, task: str = "antonyms", engine: EngineConfig | None = None) -> bool:
    """Prints one line a check.

    Args:
        model: the model to prove the engine on.
        stream: where to print.
        task: whose items the proof asks.
        engine: the engine to prove, as ``read_engine`` gives it. Default: that of a study that says nothing of it.

    Returns:
        Whether every check passed.
    """
    healthy = True

    def say(passed: bool, text: str) -> None:
        nonlocal healthy
        healthy &= passed
        print(f"{'ok  ' if passed else 'FAIL'}  {text}", file=stream, flush=True)

    _check_packages(say)
    free = shutil.disk_usage(_existing(home())).free / 2**30
    say(free >= _LEAST_FREE_GIB, f"{free:.1f} GiB free for models at {home()}")
    # No fault of the installation: few studies have tasks that execute code.
    reason = unavailable()
    say(
        True,
        f"tasks that execute model-written code are refused here: {reason}"
        if reason
        else "model-written code can be shut in: no network, no files of yours, limited time and memory",
    )
    try:
        _prove(model, task, engine or EngineConfig(), say)
    except CsLocalizeError as error:
        say(False, str(error))
    return healthy


def _check_packages(say: Callable[[bool, str], None]) -> None:
    versions = package_versions()
    say(sys.version_info[:2] >= (3, 11), f"Python {sys.version.split()[0]}")
    for name in ("torch", "transformers", "ray"):
        say(
            name in versions, f"{name} {versions.get(name, 'is missing; install cs_localize[cpu] or cs_localize[gpu]')}"
        )
    try:
        say(True, check_version())
    except UsageError as error:
        say(False, str(error))
    if find_spec("torchvision") is not None:
        # transformers imports torchvision where it is installed; one of another build breaks it.
        imports = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False)
        say(
            imports.returncode == 0,
            "torchvision imports"
            if imports.returncode == 0
            else "torchvision does not import beside this torch and breaks transformers; pip uninstall torchvision",
        )


def _prove(model: str, task: str, engine: EngineConfig, say: Callable[[bool, str], None]) -> None:
    items = get_task(task).split(0).search[: 2 * _ABLATIONS]
    spec, encoder = engine_spec(model, engine, (task,), items)
    shape = spec.shape
    say(True, f"model {model}: {shape.layers} layers x {shape.heads} heads, {shape.kv_heads} KV heads")
    chosen = engine.model_dump(exclude_defaults=True)
    options = ", ".join(f"{name}={dump_options(value).splitlines()[0]}" for name, value in chosen.items())
    say(True, f"engine vllm: {options or 'the defaults of a study'}")
    if spec.dtype == "float32" and engine.dtype == "auto":
        say(True, "studies run it in float32: this CPU has no instructions for bfloat16")
    scored = [Request(item, *encoder.encode(item), Ablation(), means=spec.means) for item in items]
    with RaySession():
        for passed, text in checks(_gather(spec, engine, scored, encoder.context)):
            say(passed, text)


@dataclass(frozen=True)
class Evidence:
    """What the engine answered, and what others answered to the same.

    Attributes:
        plain: unablated scores and next tokens in one batch.
        plain_again: the same in other batches: backwards, and among ablated requests.
        ablated: the same items under ablations of heads and of neurons.
        ablated_again: the same among unablated requests.
        counters: what the engine shows about its work on these.
        kinds: what kind of ablation each of ``exact`` is under.
        exact: in float32 the requests of ``ablated``.
        prefixed: in float32 requests behind one long prefix, under two ablations and none, one after another.
        free: in float32 what it generates without an ablation.
        cached: prompt tokens of ``prefixed`` that came from the prefix cache.
        oracle: what transformers answers to ``exact`` in float32.
        oracle_prefixed: what transformers answers to ``prefixed`` in float32.
        stock: what vLLM without this package's worker generates in the place of ``free``.
    """

    plain: Sequence[Outcome]
    plain_again: Sequence[Sequence[Outcome]]
    ablated: Sequence[Outcome]
    ablated_again: Sequence[Outcome]
    counters: Mapping[str, float]
    kinds: Sequence[str]
    exact: Sequence[Outcome]
    prefixed: Sequence[Outcome]
    free: Sequence[Outcome]
    cached: float
    oracle: Sequence[Outcome]
    oracle_prefixed: Sequence[Outcome]
    stock: Sequence[Outcome]


def checks(found: Evidence) -> Iterator[tuple[bool, str]]:
    """Judges the evidence, one line a claim: whether it holds, and what was seen."""
    counters = found.counters
    rows, neuron_rows = (counters[f"{kind}ablated_token_rows"] for kind in ("", "neuron_"))
    yield (
        rows > 0 and neuron_rows > 0,
        f"every hook scaled the {rows:.0f} token rows for heads and {neuron_rows:.0f} for neurons it should have, "
        "and every canary stayed where it was",
    )
    most = counters["most_ablations_in_a_step"]
    yield most > 1, f"{most:.0f} different ablations in one step"
    noise = max(agreement(found.plain, again).score_difference for again in found.plain_again)
    yield (
        noise <= _SCORE_DIFFERENCE,
        f"noise floor: unablated in {len(found.plain_again) + 1} different batches, {noise:.4f} nats apart",
    )
    mixing = agreement(found.ablated, found.ablated_again).score_difference
    yield (
        mixing <= _SCORE_DIFFERENCE,
        f"no contamination in a batch: ablated, alone and among others, {mixing:.4f} nats apart",
    )
    effect = agreement(found.ablated, found.plain).score_difference
    yield effect > 10 * max(noise, 1e-4), f"ablations change the answers: {effect:.3f} nats from unablated"
    # In float32 nothing but the knockout itself can differ; in bf16 two right engines differ by rounding.
    same = sum((a.text, a.tokens) == (b.text, b.tokens) for a, b in zip(found.free, found.stock, strict=True))
    yield (
        same == len(found.stock),
        f"the empty ablation changes nothing: {same} of {len(found.stock)} answers are stock vLLM's, token for token",
    )
    prefix = agreement(found.prefixed, found.oracle_prefixed).score_difference
    yield (
        found.cached > 0 and prefix <= _EXACT_DIFFERENCE,
        f"no contamination through the cache: two ablations and none behind one prefix, {found.cached:.0f} tokens from "
        f"the cache, {prefix:.4f} nats from transformers",
    )
    same_token = agreement(found.exact, found.oracle).same_token
    apart = {kind: _of_kind(found, kind).score_difference for kind in dict.fromkeys(found.kinds)}
    yield (
        same_token >= _SAME_TOKEN and max(apart.values()) <= _EXACT_DIFFERENCE,
        f"agreement with transformers under the same ablations, in float32: {same_token:.1%} same next token; nats "
        f"apart: {', '.join(f'{kind} {nats:.4f}' for kind, nats in apart.items())}",
    )


def _of_kind(found: Evidence, kind: str) -> Agreement:
    """With transformers, under the ablations of one kind."""
    chosen = [i for i, other in enumerate(found.kinds) if other == kind]
    return agreement([found.exact[i] for i in chosen], [found.oracle[i] for i in chosen])


def _gather(spec: EngineSpec, engine: EngineConfig, scored: Sequence[Request], context: int | None) -> Evidence:
    """Asks the engine in the dtype of a study and in float32, transformers, and vLLM as it is."""
    kinds = {ablation: kind for kind, ablations in _ablations(spec.shape).items() for ablation in ablations}
    ablated = proof_requests(scored, list(kinds))
    plain = [replace(request, ablation=Ablation()) for request in ablated]
    mixed = [request for pair in zip(ablated, plain, strict=True) for request in pair]
    prefixed = _prefixed(scored[0], ablated, context)
    free = [replace(request, mode="generate", max_tokens=_FREE_TOKENS) for request in scored]
    exact = replace(spec, dtype="float32")
    _, threads, gpus = fleet_size(engine.model_copy(update={"workers": 1}))
    _, cores, _ = fleet_size(EngineConfig(name="hf", workers=1))  # all of them, also where vLLM has a GPU
    (first, backwards, alone, together), (*_, counters) = run_on_worker(
        answer_in_process, spec, [plain, plain[::-1], ablated, mixed], cores=threads, gpus=gpus
    )
    (masked, unablated, *behind), (_, before, *_, after) = run_on_worker(
        answer_in_process, exact, [ablated, free, *prefixed], cores=threads, gpus=gpus
    )
    stock = run_on_worker(stock_answers, exact, free, cores=threads, gpus=gpus)
    (oracle, *oracle_behind), _ = run_on_worker(
        answer_in_process, spec.in_transformers(), [ablated, *prefixed], cores=cores
    )
    return Evidence(
        plain=first,
        plain_again=[backwards[::-1], together[1::2]],
        ablated=alone,
        ablated_again=together[0::2],
        counters=counters,
        kinds=[kinds[request.ablation] for request in ablated],
        exact=masked,
        prefixed=[outcome for (outcome,) in behind],
        free=unablated,
        cached=after["cached_prompt_tokens"] - before["cached_prompt_tokens"],
        oracle=oracle,
        oracle_prefixed=[outcome for (outcome,) in oracle_behind],
        stock=stock,
    )


def _ablations(shape: ModelShape) -> dict[str, list[Ablation]]:
    """By kind: random heads scaled and replaced by their means, and every tenth neuron, four times."""
    zeroed = random_ablations(shape, _ABLATIONS - 4, max(1, shape.n_heads // 20), stream(0, "doctor"))
    heads = [[head for head, _ in ablation.heads] for ablation in zeroed]
    neurons = [Neuron(layer, n) for layer in range(shape.layers) for n in range(shape.ffn)]
    return {
        "heads zeroed": zeroed[4:],
        "halved": [Ablation.of(some, scale=0.5) for some in heads[:2]],
        "replaced by their means": [Ablation.to_mean(some) for some in heads[2:4]],
        "neurons zeroed": [Ablation.of(neurons=neurons[first::10]) for first in range(4)],
    }


def _prefixed(request: Request, ablated: Sequence[Request], context: int | None) -> list[list[Request]]:
    """One request a call, each behind the same prefix of some cache blocks: under two ablations, none, and again."""
    room = min(_PREFIX_TOKENS, context or _PREFIX_TOKENS) - len(request.answer_ids)
    prompt = (request.prompt_ids * room)[:room]
    one, other = ablated[0].ablation, ablated[-1].ablation
    return [
        [replace(request, prompt_ids=prompt, ablation=ablation)] for ablation in (one, other, Ablation(), one, other)
    ]


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)
