"""A large study on paper: Llama-3.1-8B, ten capabilities, on 1, 8 and 64 GPUs.

    python benchmarks/scale.py             # the tables of docs/scale.md, from the assumptions below; takes no time
    python benchmarks/scale.py --measure   # the same arithmetic against this machine's vLLM; a minute on two cores

docs/scale.md says where the constants come from, what is measured and what is assumed.
"""

from __future__ import annotations

import argparse
import importlib.resources
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from cs_localize.config import StudyConfig, load_study

BATCH = 128  # engine.max_num_seqs
BLOCK = 32  # engine.block_size: a shared prefix is kept in whole blocks
BATCHED_TOKENS = 8192  # of one vLLM step
BYTES = 2  # bf16
DRIVER_RATE = 8000.0  # outcomes/s that one driver takes in: benchmarks/fleet.py rate, on two cores
EFFICIENCY = {1: 1.0, 8: 0.95, 64: 0.85}  # of so many GPUs
BLOCK_ITEMS = 8  # items asked under one mask, where masks are not drawn afresh for every request
BLOCK_PENALTY = 1.5  # requests such a design needs, in multiples of fresh masks
DENSITY = 0.03  # heads knocked out together, half of the demo's, since there are four times as many


@dataclass(frozen=True)
class Model:
    """A decoder's geometry, as in its ``config.json``."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocabulary: int
    tied: bool

    @property
    def body(self) -> int:
        """Parameters that every token passes through: all but the embeddings."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn + 2 * self.hidden) + self.hidden

    @property
    def output(self) -> int:
        """Parameters of the output matrix, which only tokens that are scored pass through."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.body + self.output * (1 if self.tied else 2)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES


@dataclass(frozen=True)
class Machine:
    """What one engine runs on.

    Attributes:
        flops: peak dense bf16 FLOP/s.
        bandwidth: peak bytes/s of its memory.
        prefill_share: share of the peak that a prefill reaches.
        decode_share: share of the bandwidth that a decoding step reaches.
        step_s: what a step costs besides: scheduling, launches, the hooks.
        read_rate: bytes/s at which weights are read from storage.
        start_s: start of an engine besides reading weights.
    """

    flops: float
    bandwidth: float
    prefill_share: float = 0.4
    decode_share: float = 0.6
    step_s: float = 0.02
    read_rate: float = 1e9
    start_s: float = 45.0


@dataclass(frozen=True)
class Prompts:
    """Tokens of one request: the shared shots, the question, the scored answer, and what is generated instead of it."""

    shots: int
    question: int
    answer: int
    generated: int


LLAMA = Model(32, 32, 8, 128, 4096, 14336, 128256, tied=False)
SMOLLM2 = Model(30, 9, 3, 64, 576, 1536, 49152, tied=True)
H100 = Machine(989e12, 3.35e12)
FORMATS = {"short": Prompts(24, 8, 2, 6), "long": Prompts(900, 100, 100, 150)}


def wave_s(model: Model, machine: Machine, prompts: Prompts, batch: int, same_mask: int, generate: bool) -> float:
    """Seconds for a batch of requests that run together, of which ``same_mask`` at a time share one mask."""
    length = prompts.shots + prompts.question
    kept = prompts.shots // BLOCK * BLOCK * (1 - 1 / same_mask)
    fresh = batch * (length - kept)
    a_token = 2 * model.body + 4 * model.layers * model.heads * model.head_dim * length
    speed = machine.flops * machine.prefill_share
    prefill = (fresh * a_token + batch * 2 * model.output) / speed + math.ceil(fresh / BATCHED_TOKENS) * machine.step_s
    compute = batch * (a_token + 2 * model.output) / speed
    read = (model.parameters * BYTES + batch * length * model.kv_bytes) / (machine.bandwidth * machine.decode_share)
    steps = (prompts.generated if generate else prompts.answer) - 1  # the first token comes with the prefill
    return prefill + steps * (max(compute, read) + machine.step_s)


@dataclass(frozen=True)
class Stage:
    """Requests that are asked together.

    Attributes:
        requests: how many.
        same_mask: how many of them, of one task, share a mask.
        generate: whether answers are generated rather than scored.
        rounds: how many times the next requests wait for the last outcomes.
    """

    requests: int
    same_mask: int
    generate: bool = False
    rounds: int = 1

    def seconds(self, model: Model, machine: Machine, prompts: Prompts, engines: int) -> float:
        """Time on so many engines; the driver has to keep up."""
        each = math.ceil(self.requests / self.rounds / engines)
        full, rest = divmod(each, BATCH)
        batches = [BATCH] * full + [rest] * bool(rest)
        busy = sum(wave_s(model, machine, prompts, batch, self.same_mask, self.generate) for batch in batches)
        return max(self.rounds * busy / EFFICIENCY[engines], self.requests / DRIVER_RATE)


def study(config: StudyConfig, model: Model, tests_a_head: float, blocks: bool) -> dict[str, Stage]:
    """The stages of a study with the settings of ``config`` but for the search, which follows from tests a head."""
    tasks, measured = len(config.tasks), len(config.tasks) + len(config.controls)
    search, held_out = config.search_items or 0, config.held_out_items or 0
    masked = math.ceil(tests_a_head / DENSITY) * (BLOCK_PENALTY if blocks else 1)
    pilot = config.design.pilot.requests_a_layer * model.layers
    tried = config.select.items + config.select.control_items
    draws = config.confirm.random_draws + config.confirm.curve
    return {
        "search": Stage(round(tasks * (masked + pilot + search)), BLOCK_ITEMS if blocks else 1),
        "naming": Stage(
            tasks * config.select.requests, config.select.items, generate=True, rounds=config.select.requests // tried
        ),
        "confirmation": Stage(
            held_out * (measured * (tasks + 3) + tasks * draws), held_out, generate=True
        ),  # sets on all tasks, the universal heads, the baseline twice; curves and random heads on their own task
    }


def sweep(config: StudyConfig, model: Model) -> dict[str, Stage]:
    """Every head on every search item of every task, head by head."""
    items = config.search_items or 0
    return {"sweep": Stage(len(config.tasks) * items * (model.layers * model.heads + 1), items)}


def load_s(model: Model, machine: Machine) -> float:
    """From nothing to an engine that answers."""
    return machine.start_s + model.parameters * BYTES / machine.read_rate


def print_tables() -> None:
    """What docs/scale.md quotes."""
    with importlib.resources.as_file(importlib.resources.files("cs_localize") / "demo.yaml") as file:
        demo = load_study(file)
    pilot = demo.design.pilot.requests_a_layer * SMOLLM2.layers
    tests = (demo.design.requests - pilot) * demo.design.density
    config = demo.model_copy(update={"tasks": tuple(f"task {number}" for number in range(10))})
    heads = LLAMA.layers * LLAMA.heads
    print(
        f"Llama-3.1-8B: {heads:,} heads, {LLAMA.parameters:,} parameters, {LLAMA.parameters * BYTES / 1e9:.1f} GB, "
        f"{LLAMA.kv_bytes / 1024:.0f} KiB of keys and values a token\n"
        f"tests a head: {tests:.1f}, as in the demo; at density {DENSITY:.0%}, {math.ceil(tests / DENSITY):,} masked "
        f"requests a task and {LLAMA.layers * demo.design.pilot.requests_a_layer} of the pilot\n"
        f"an engine loads in {load_s(LLAMA, H100):.0f} s"
    )
    print(f"\n{'prompts':<8}{'asked':<34}{'requests':>10}{'a GPU answers':>16}")
    plans: dict[tuple[str, str], dict[str, Stage]] = {}
    for name in FORMATS:
        plans[name, "fresh masks"] = study(config, LLAMA, tests, blocks=False)
        plans[name, f"masks for {BLOCK_ITEMS} items"] = study(config, LLAMA, tests, blocks=True)
        plans[name, "sweep"] = sweep(config, LLAMA)
    for (name, kind), stages in plans.items():
        for stage, asked in stages.items():
            if stage in ("naming", "confirmation") and kind != "fresh masks":
                continue  # the same again
            rate = BATCH / wave_s(LLAMA, H100, FORMATS[name], BATCH, asked.same_mask, asked.generate)
            label = f"{stage}, {kind}" if stage == "search" else stage
            print(f"{name:<8}{label:<34}{asked.requests:>10,}{rate:>14,.0f}/s")
    print(f"\n{'prompts':<8}{'study':<20}{'GPUs':>5}{'minutes':>10}{'of which loading':>18}{'GPU-hours':>11}")
    for (name, kind), stages in plans.items():
        for engines in EFFICIENCY:
            loading = load_s(LLAMA, H100)
            wall = loading + sum(stage.seconds(LLAMA, H100, FORMATS[name], engines) for stage in stages.values())
            spent = f"{wall / 60:>10.1f}{loading / wall:>18.0%}{wall * engines / 3600:>11.2f}"
            print(f"{name:<8}{kind:<20}{engines:>5}{spent}")


def measure() -> None:
    """Prints what the arithmetic predicts for this machine and SmolLM2-135M beside what vLLM does, in one process."""
    cores = len(os.sched_getaffinity(0))
    os.environ |= {
        "OMP_NUM_THREADS": str(cores),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    import torch

    from cs_localize.config import EngineConfig
    from cs_localize.heads import Ablation
    from cs_localize.measure.protocol import Request
    from cs_localize.measure.vllm import VLLMEngine
    from cs_localize.session import engine_spec
    from cs_localize.tasks import get_task

    torch.set_num_threads(cores)
    square = torch.ones(2048, 2048, dtype=torch.bfloat16)
    wide = torch.ones(2**27, dtype=torch.int8)
    flops = 2 * 2048**3 / _median_s(lambda: square @ square)
    bandwidth = 2 * wide.numel() / _median_s(wide.clone)
    print(f"{cores} cores: {flops / 1e9:.0f} GFLOP/s (bf16, 2048 x 2048), {bandwidth / 1e9:.1f} GB/s (copy)")
    machine = replace(H100, flops=flops, bandwidth=bandwidth)

    items = get_task("antonyms").split(0).search
    spec, encoder = engine_spec("smollm2-135m-instruct", EngineConfig(), ("antonyms",))
    started = time.perf_counter()
    engine = VLLMEngine(spec)
    print(f"the engine loaded in {time.perf_counter() - started:.0f} s")
    rng = np.random.default_rng(0)

    def asked(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Request:
        zeroed = rng.choice(spec.shape.n_heads, round(0.06 * spec.shape.n_heads), replace=False)
        return Request(items[0], prompt, answer, Ablation.of(spec.shape.head(int(i)) for i in zeroed))

    def drawn(prompt: int, answer: int) -> Request:
        ids = tuple(map(int, rng.integers(100, 1000, prompt + answer)))
        return asked(ids[:prompt], ids[prompt:])

    print(f"{'a fresh mask for every request':<34}{'predicted':>11}{'measured':>12}{'ratio':>8}")
    for name, requests in (
        ("antonyms", [asked(*encoder.encode(items[number % len(items)])) for number in range(3 * BATCH)]),
        ("long prompts", [drawn(256, 2) for _ in range(BATCH)]),
        ("long answers", [drawn(32, 16) for _ in range(2 * BATCH)]),
    ):
        engine.measure(requests[:8])  # warms up
        started = time.perf_counter()
        engine.measure(requests)
        rate = len(requests) / (time.perf_counter() - started)
        prompt = round(statistics.mean(len(request.prompt_ids) for request in requests))
        answer = round(statistics.mean(len(request.answer_ids) for request in requests))
        predicted = BATCH / wave_s(SMOLLM2, machine, Prompts(0, prompt, answer, 0), BATCH, 1, generate=False)
        label = f"{name}, {prompt} + {answer} tokens"
        print(f"{label:<34}{predicted:>9.1f}/s{rate:>10.1f}/s{predicted / rate:>8.2f}")
    engine.close()


def _median_s(work: Callable[[], object]) -> float:
    """Median seconds of five runs, after one that warms up."""
    work()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="hold the arithmetic against this machine's vLLM")
    if parser.parse_args().measure:
        measure()
    else:
        print_tables()
