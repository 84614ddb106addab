"""Throughput of the vLLM engine at 1 to 1,024 different ablations, beside that of stock vLLM.

Two processes, each with its own vLLM, worker class and cache root: stock vLLM with its default worker, and this
library's engine with all of its proof (two canaries a call, counters, forced answers, no asynchronous scheduling). Both
have the same block size, memory for keys and values and number of sequences, and no prefix cache. Both answer the same
prompts: once with one token, of which they report the log-probability (scored; our engine is told the token), and once
with several, chosen greedily (generated; under an ablation an answer can end early, so tokens are counted).

The processes take turns; while one works the other waits for its next line. A ratio compares a run with the mean of the
stock runs right before and after it, so that a machine that slows down or speeds up weighs on both sides. No ablation
is asked twice, so the memory of the engine's process at the end shows whether they leave anything behind.

    python benchmarks/masked_throughput.py [--model DIR_OR_NAME] [--rounds N] [--requests N] [--modes eager compiled]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence

import numpy as np

from arms import Arm, Order, serve, spread
from processes import ProcessEnded, memory_mb, positive

PROMPT_TOKENS = 24
ANSWER_TOKENS = 8
BLOCK_SIZE = 32
ABLATED_SHARE = 0.05
DIFFERENT = (1, 16, 256, 1024)
WAYS = {"scored": 1, "generated": ANSWER_TOKENS}
MODES = ("eager", "compiled")


def main() -> None:
    """Measures and prints; the same file serves as the child processes."""
    parser = argparse.ArgumentParser(description="Throughput of ablated requests beside stock vLLM.")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a directory, a hub id or a built-in name")
    parser.add_argument("--rounds", type=positive, default=3, help="times that every case runs (default 3)")
    parser.add_argument("--requests", type=positive, default=DIFFERENT[-1], help="requests of a run (default 1024)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: both")
    parser.add_argument("--serve", choices=("stock", "masked"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(functools.partial(_stock if options.serve == "stock" else _masked, options))
        return
    if options.requests < DIFFERENT[-1]:
        parser.error(f"{DIFFERENT[-1]} different ablations need as many requests")
    print(f"{options.requests} requests a run, {options.rounds} rounds, median (least .. most)")
    for mode in options.modes:
        try:
            compare(options, mode)
        except ProcessEnded as error:
            raise SystemExit(f"masked_throughput: {error}") from None


def compare(options: argparse.Namespace, mode: str) -> None:
    """Runs the cases in turn and prints computed tokens per second and ratios."""
    arguments = ["--model", options.model, "--requests", str(options.requests), "--modes", mode]
    with Arm(__file__, "stock", arguments) as stock, Arm(__file__, "masked", arguments) as masked:
        most, different_in_all, memory = 0, 0, []
        for way, tokens in WAYS.items():
            stock.run(way=way)  # warms up
            memory.append(masked.run(way=way, different=DIFFERENT[-1])["memory_mb"])
            different_in_all += DIFFERENT[-1]
            before = _rate(stock.run(way=way))
            stock_rates = [before]
            rates: dict[int, list[float]] = {different: [] for different in DIFFERENT}
            ratios: dict[int, list[float]] = {different: [] for different in DIFFERENT}
            lengths = []
            for _ in range(options.rounds):
                for different in DIFFERENT:
                    answer = masked.run(way=way, different=different)
                    after = _rate(stock.run(way=way))
                    rates[different].append(_rate(answer))
                    ratios[different].append(2 * _rate(answer) / (before + after))
                    lengths.append(answer["computed"] / options.requests)
                    stock_rates.append(after)
                    before = after
                    most = max(most, answer["most"])
                    different_in_all += different
                    memory.append(answer["memory_mb"])
            print(f"{mode}, {way}: {PROMPT_TOKENS} + {tokens} tokens, computed tokens/s")
            print(f"  stock vLLM                 {spread(stock_rates, '.0f')}")
            for different in DIFFERENT:
                shown = f"{spread(rates[different], '.0f')}, ratio to stock {spread(ratios[different], '.3f')}"
                print(f"  {different:5d} different ablations {shown}", flush=True)
            print(f"  tokens computed a request: {PROMPT_TOKENS + tokens - 1} by stock, {np.mean(lengths):.2f} by ours")
        print(
            f"{mode}: most different ablations in one step, canaries among them: {most}; memory of our process "
            f"{memory[0]:.0f} MB after the first {DIFFERENT[-1]}, {memory[-1]:.0f} MB after {different_in_all}",
            flush=True,
        )


def _rate(answer: Order) -> float:
    return float(answer["computed"]) / float(answer["seconds"])


def _prompts(requests: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(int(i) for i in rng.integers(100, 1000, PROMPT_TOKENS)) for _ in range(requests)]


def _max_num_seqs(requests: int) -> int:
    return requests + 2  # the engine's two canaries share the steps


def _computed(tokens: Sequence[int]) -> int:
    """Tokens that the model computed on, of requests of so many: the last of an answer is read, not computed on."""
    return sum(tokens) - len(tokens)


def _stock(options: argparse.Namespace) -> Callable[[Order], Order]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from cs_localize.models import resolve

    llm = LLM(
        model=str(resolve(options.model).path),
        enforce_eager=options.modes == ["eager"],
        max_num_seqs=_max_num_seqs(options.requests),
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    prompts = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in _prompts(options.requests)]
    scored = SamplingParams(temperature=0, max_tokens=1, logprobs=0, detokenize=False)
    params = {"scored": scored, "generated": SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)}

    def run(order: Order) -> Order:
        outputs = llm.generate(prompts, params[order["way"]], use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == WAYS[order["way"]] for output in outputs)
        return {"computed": _computed([PROMPT_TOKENS + WAYS[order["way"]]] * len(outputs))}

    return run


def _masked(options: argparse.Namespace) -> Callable[[Order], Order]:
    from cs_localize.heads import Ablation
    from cs_localize.measure.protocol import Request
    from cs_localize.measure.spec import EngineSpec
    from cs_localize.measure.vllm import VLLMEngine
    from cs_localize.models import resolve
    from cs_localize.outcomes import Item

    local = resolve(options.model)
    prompts = _prompts(options.requests)
    resources = {
        "max_num_seqs": _max_num_seqs(options.requests),
        "block_size": BLOCK_SIZE,
        "prefix_cache": False,
        "eager": options.modes == ["eager"],
    }
    engine = VLLMEngine(EngineSpec("vllm", str(local.path), local.fingerprint, local.shape, resources=resources))
    rng = np.random.default_rng(1)
    many = max(1, round(ABLATED_SHARE * local.shape.n_heads))
    answer = (int(rng.integers(100, 1000)),)

    def run(order: Order) -> Order:
        # New ablations every time, as in a search, so that none is in the table yet.
        drawn = [rng.choice(local.shape.n_heads, many, replace=False) for _ in range(order["different"])]
        ablations = [Ablation.of(local.shape.head(int(i)) for i in heads) for heads in drawn]
        requests = []
        for number, prompt in enumerate(prompts):
            item = Item("throughput", str(number), "", "")
            ablation = ablations[number % len(ablations)]
            if order["way"] == "scored":
                requests.append(Request(item, prompt, answer, ablation))
            else:
                requests.append(Request(item, prompt, (), ablation, "generate", ANSWER_TOKENS, stop=()))
        outcomes = engine.measure(requests)
        computed = _computed([outcome.tokens for outcome in outcomes])
        most = int(engine.evidence()["most_ablations_in_a_step"])
        return {"computed": computed, "most": most, "memory_mb": memory_mb()}

    return run


if __name__ == "__main__":
    main()
