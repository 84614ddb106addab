"""How far the vLLM engine and transformers are apart under the same ablations, by architecture and mode.

A small model with random weights for every architecture, and SmolLM2-135M-Instruct. Both engines answer the same
requests under heads zeroed, halved and replaced by their means, neurons zeroed, and several of these at once, mixed in
one batch. Every mode has a process of its own, in which one model after the other is loaded. Prints a line for every
model, mode and dtype: for every intervention the largest difference of a score in nats; beside it what rounding alone
does, the largest difference between transformers in this dtype and in float32; and how much the interventions change a
score on average.

    python benchmarks/parity.py [--models LIST] [--modes LIST] [--dtypes LIST] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cs_localize.heads import Ablation, Head, ModelShape, Neuron
from cs_localize.measure.protocol import Engine, Request
from cs_localize.measure.spec import EngineSpec, load_engine
from cs_localize.measure.vllm import VLLMEngine
from cs_localize.models import random_model, resolve
from cs_localize.outcomes import Item
from cs_localize.seeds import stream

Floats = NDArray[np.float64]

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "olmo2", "smollm3")
REAL = "smollm2-135m-instruct"
TRANSFORMERS_BACKEND = "llama/transformers"
MODELS = (*ARCHITECTURES, TRANSFORMERS_BACKEND, REAL)
MODES = ("eager", "compiled")
DTYPES = ("float32", "bfloat16")
ITEMS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 40, 3
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Parity:
    """One model in one mode.

    Attributes:
        model: architecture of the random model, or name of the real one.
        code: vLLM's class that runs it.
        mode: ``eager`` or ``compiled``.
        dtype: of both engines.
        apart: by intervention the largest difference of a score between the engines, in nats.
        rounding: the largest difference of a score between transformers in this dtype and in float32, in nats.
        effect: by intervention the mean absolute change of a score that it makes in transformers, in nats.
    """

    model: str
    code: str
    mode: str
    dtype: str
    apart: dict[str, float]
    rounding: float
    effect: dict[str, float]


def main() -> None:
    """Measures and prints; the same file serves as the child processes."""
    parser = argparse.ArgumentParser(description="Agreement of the vLLM engine with transformers under ablations.")
    parser.add_argument("--models", default=",".join(MODELS), help="architectures and models, separated by commas")
    parser.add_argument("--modes", default=",".join(MODES), help="eager, compiled or both")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="float32, bfloat16 or both")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    parser.add_argument("--serve", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    models, dtypes = options.models.split(","), options.dtypes.split(",")
    if options.serve:
        serve(options.serve, models, dtypes)
        return
    for known, chosen in ((MODELS, models), (MODES, options.modes.split(",")), (DTYPES, dtypes)):
        if unknown := set(chosen) - set(known):
            raise SystemExit(f"parity: no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    found = [parity for mode in options.modes.split(",") for parity in measured(mode, models, dtypes)]
    print("\n".join(json.dumps(asdict(parity)) for parity in found) if options.json else table(found))


def measured(mode: str, models: Sequence[str], dtypes: Sequence[str]) -> list[Parity]:
    """Runs one mode in a process of its own, compiled with a compile cache of its own."""
    with tempfile.TemporaryDirectory(prefix="parity-") as cache:
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if mode == "compiled":
            environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "VLLM_CACHE_ROOT": cache}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [__file__, "--serve", mode, "--models", ",".join(models), "--dtypes", ",".join(dtypes)]
        environment = {**os.environ, **environment, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"parity: {mode} failed\n{done.stderr[-4000:]}")
    return [Parity(**json.loads(line)) for line in done.stdout.splitlines()]


def table(found: Sequence[Parity]) -> str:
    """The lines as a table of Markdown, model by model."""
    found = sorted(found, key=lambda row: (MODELS.index(row.model), DTYPES.index(row.dtype), MODES.index(row.mode)))
    names = list(found[0].apart)
    heading = ["model", "vLLM's class", "mode", "dtype", *names, "rounding", "effect"]
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for row in found:
        apart = " | ".join(f"{row.apart[name]:.1e}" for name in names)
        effect = np.mean(list(row.effect.values()))
        rounding = f"{row.rounding:.1e}" if row.rounding else "0"
        lines.append(f"| {row.model} | {row.code} | {row.mode} | {row.dtype} | {apart} | {rounding} | {effect:.2f} |")
    return "\n".join(lines)


def serve(mode: str, models: Sequence[str], dtypes: Sequence[str]) -> None:
    """Prints one JSON object for every model and dtype."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    with tempfile.TemporaryDirectory(prefix="parity-models-") as folder:
        specs = [(model, _spec(model, dtype, Path(folder))) for model in models for dtype in dtypes]
        # Transformers first: vLLM's Transformers backend changes the classes of a model for the rest of the process.
        wanted = [(in_transformers(spec), in_transformers(spec, "float32")) for _, spec in specs]
        for (model, spec), (want, exact) in zip(specs, wanted, strict=True):
            answers.write(json.dumps(asdict(compare(model, spec, mode, want, exact))) + "\n")
            answers.flush()


def in_transformers(spec: EngineSpec, dtype: str | None = None) -> Floats:
    """The scores of transformers, ``[interventions, items]``."""
    return _scores(load_engine(replace(spec.in_transformers(), dtype=dtype or spec.dtype)), spec)


def compare(model: str, spec: EngineSpec, mode: str, want: Floats, exact: Floats) -> Parity:
    """The vLLM engine on one model, beside the scores of transformers in its dtype and in float32."""
    resources = {"eager": mode == "eager", "max_num_seqs": 32, "neuron_slots": 4}
    engine = VLLMEngine(replace(spec, resources=resources))
    code = engine.architecture
    apart = np.abs(_scores(engine, spec) - want).max(axis=1).tolist()
    effect = np.abs(want - want[0]).mean(axis=1).tolist()
    names = list(_interventions(spec.shape))
    return Parity(
        model=model,
        code=code,
        mode=mode,
        dtype=spec.dtype,
        apart=dict(zip(names, apart, strict=True)),
        rounding=float(np.abs(want - exact).max()),
        effect=dict(zip(names[1:], effect[1:], strict=True)),
    )


def _scores(engine: Engine, spec: EngineSpec) -> Floats:
    """The score of every item under every intervention, and the end of the engine."""
    outcomes = engine.measure(list(_requests(spec)))
    engine.close()
    return np.array([outcome.score for outcome in outcomes]).reshape(-1, ITEMS)


def _spec(model: str, dtype: str, folder: Path) -> EngineSpec:
    if model == REAL:
        local = resolve(model)
        return EngineSpec("vllm", str(local.path), local.fingerprint, local.shape, dtype, mean_prompts=_prompts())
    architecture, _, code = model.partition("/")
    directory = folder / architecture
    if not directory.exists():
        random_model(directory, architecture)
    local = resolve(str(directory))
    settings = {"model_impl": code} if code else {}
    return EngineSpec("vllm", str(local.path), local.fingerprint, local.shape, dtype, settings, {}, _prompts())


def _prompts() -> tuple[tuple[int, ...], ...]:
    rows = stream(0, "parity", "prompts").integers(32, 120, (ITEMS, PROMPT_TOKENS))
    return tuple(tuple(int(token) for token in row) for row in rows)


def _requests(spec: EngineSpec) -> Iterator[Request]:
    answers = stream(0, "parity", "answers").integers(32, 120, (ITEMS, ANSWER_TOKENS)).tolist()
    for ablation in _interventions(spec.shape).values():
        for i, (prompt, answer) in enumerate(zip(_prompts(), answers, strict=True)):
            yield Request(Item("parity", str(i), "", "x"), prompt, tuple(answer), ablation, means=spec.means)


def _interventions(shape: ModelShape) -> dict[str, Ablation]:
    rng = stream(0, "parity", "interventions")

    def heads() -> list[Head]:
        many = max(2, shape.n_heads // 20)
        return [shape.head(int(i)) for i in rng.choice(shape.n_heads, many, replace=False)]

    layer = shape.layers // 2
    neurons = [Neuron(layer, int(n)) for n in rng.choice(shape.ffn, shape.ffn // 4, replace=False)]
    several = heads()
    another = next(head for head in shape.all_heads() if head not in several)
    return {
        "none": Ablation(),
        "zero": Ablation.of(heads()),
        "scale": Ablation.of(heads(), scale=0.5),
        "mean": Ablation.to_mean(heads()),
        "neurons": Ablation.of(neurons=neurons),
        "several": replace(Ablation.of(several, neurons, scale=-0.5), mean_heads=(another,)),
    }


if __name__ == "__main__":
    main()
