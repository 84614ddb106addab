"""Throughput of the vLLM engine at 1, 16 and 256 different ablations, beside that of stock vLLM.

Two processes, each with its own vLLM, worker class and cache root: stock vLLM with its default worker, and this
library's engine with all of its proof (canaries, counters, forced answers). Both read the same prompts and run the same
number of tokens a request, eager, with the prefix cache off. They take turns: stock, 1 ablation, stock, 16, stock, 256,
and so on; while one works the other waits for its next line. A ratio compares a run with the mean of the stock runs
right before and after it, so that a machine that slows down or speeds up weighs on both sides.

    python benchmarks/masked_throughput.py [--model DIR_OR_NAME] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np

from processes import LineProcess, ProcessEnded, positive

REQUESTS = 256
PROMPT_TOKENS = 32
ANSWER_TOKENS = 8
COMPUTED_TOKENS = REQUESTS * (PROMPT_TOKENS + ANSWER_TOKENS - 1)  # the last answer token is read, not computed on
MAX_NUM_SEQS = REQUESTS + 2  # the engine's two canaries share the steps
KV_CACHE_GIB = 1
ABLATED_SHARE = 0.05
DIFFERENT = (1, 16, 256)

Prompts = list[tuple[int, ...]]


def main() -> None:
    """Measures and prints; the same file serves as the child processes."""
    parser = argparse.ArgumentParser(description="Throughput of ablated requests beside stock vLLM.")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a directory, a hub id or a built-in name")
    parser.add_argument("--rounds", type=positive, default=3, help="times that every arm runs (default 3)")
    parser.add_argument("--serve", choices=("stock", "masked"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.model)
    else:
        try:
            compare(options.model, options.rounds)
        except ProcessEnded as error:
            raise SystemExit(f"masked_throughput: {error}") from None


def compare(model: str, rounds: int) -> None:
    """Runs the arms in turn and prints tokens per second and ratios."""
    with Child("stock", model) as stock, Child("masked", model) as masked:
        stock.run(0)  # warms up
        masked.run(DIFFERENT[-1])
        before = stock.run(0)
        stock_rates = [before]
        rates: dict[int, list[float]] = {different: [] for different in DIFFERENT}
        ratios: dict[int, list[float]] = {different: [] for different in DIFFERENT}
        for _ in range(rounds):
            for different in DIFFERENT:
                rate = masked.run(different)
                after = stock.run(0)
                rates[different].append(rate)
                ratios[different].append(2 * rate / (before + after))
                stock_rates.append(after)
                before = after
    print(f"{REQUESTS} requests of {PROMPT_TOKENS} + {ANSWER_TOKENS} tokens, {rounds} rounds, median (least .. most)")
    print(f"stock vLLM          {_spread(stock_rates, '.0f')} computed tokens/s")
    for different in DIFFERENT:
        print(
            f"{different:3d} ablations       {_spread(rates[different], '.0f')} computed tokens/s, "
            f"ratio to stock {_spread(ratios[different], '.3f')}"
        )
    print(f"most different ablations in one step: {masked.most}")


class Child:
    """One arm in a process of its own.

    Attributes:
        most: most different ablations that have shared a step so far, the canaries' two among them.
    """

    def __init__(self, arm: str, model: str) -> None:
        self.most = 0
        self._cache = tempfile.TemporaryDirectory(prefix=f"vllm-{arm}-")
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
            "VLLM_DO_NOT_TRACK": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
        }
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._process = LineProcess(
            [__file__, "--serve", arm, "--model", model],
            {**os.environ, **environment, "PYTHONPATH": path, "VLLM_CACHE_ROOT": self._cache.name},
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.end()
        self._cache.cleanup()

    def run(self, different: int) -> float:
        """Computed tokens per second with so many different ablations; 0 for stock."""
        answer = json.loads(self._process.ask(str(different)))
        self.most = int(answer["most"])
        return COMPUTED_TOKENS / float(answer["seconds"])


def serve(arm: str, model: str) -> None:
    """Answers each line, a number of ablations, with the seconds that all requests took, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers

    from cs_localize.models import resolve

    local = resolve(model)
    rng = np.random.default_rng(0)
    prompts = [tuple(int(i) for i in rng.integers(100, 1000, PROMPT_TOKENS)) for _ in range(REQUESTS)]
    run = _stock(str(local.path), prompts) if arm == "stock" else _masked(model, prompts)
    for line in sys.stdin:
        started = time.perf_counter()
        most = run(int(line))
        answers.write(json.dumps({"seconds": time.perf_counter() - started, "most": most}) + "\n")
        answers.flush()


def _stock(model_dir: str, prompts: Prompts) -> Callable[[int], float]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=model_dir,
        enforce_eager=True,
        max_num_seqs=MAX_NUM_SEQS,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)

    def run(_different: int) -> float:
        outputs = llm.generate([TokensPrompt(prompt_token_ids=list(p)) for p in prompts], params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == ANSWER_TOKENS for output in outputs)
        return 0

    return run


def _masked(model: str, prompts: Prompts) -> Callable[[int], float]:
    from cs_localize.heads import Ablation
    from cs_localize.measure.protocol import Request
    from cs_localize.measure.spec import EngineSpec
    from cs_localize.measure.vllm import VLLMEngine
    from cs_localize.models import resolve
    from cs_localize.outcomes import Item

    local = resolve(model)
    resources = {"max_num_seqs": MAX_NUM_SEQS, "prefix_cache": False}
    engine = VLLMEngine(EngineSpec("vllm", str(local.path), local.fingerprint, local.shape, resources=resources))
    rng = np.random.default_rng(1)
    many = max(1, round(ABLATED_SHARE * local.shape.n_heads))
    answer = tuple(int(i) for i in rng.integers(100, 1000, ANSWER_TOKENS))

    def run(different: int) -> float:
        # New ablations every time, as in a search, so that none is in the table yet.
        drawn = [rng.choice(local.shape.n_heads, many, replace=False) for _ in range(different)]
        ablations = [Ablation.of(local.shape.head(int(i)) for i in heads) for heads in drawn]
        engine.measure(
            [
                Request(Item("throughput", str(number), "", ""), prompt, answer, ablations[number % different])
                for number, prompt in enumerate(prompts)
            ]
        )
        return engine.evidence()["most_ablations_in_a_step"]

    return run


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


if __name__ == "__main__":
    main()
