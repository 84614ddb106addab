"""Throughput of the vLLM engine at 1 to 1,024 different ablations, beside that of stock vLLM.

Two processes, each with its own vLLM, worker class and cache root: stock vLLM with its default worker, and this
library's engine with all of its proof (two canaries a call, counters, forced answers, no asynchronous scheduling). Both
have the same block size, memory for keys and values and number of sequences, and no prefix cache. Both answer the same
prompts: once with one token, of which they report the log-probability (scored; our engine is told the token), and once
with several, chosen greedily (generated; under an ablation an answer can end early, so tokens are counted).

The processes take turns; while one works the other waits for its next line. A ratio compares a run with the mean of the
stock runs right before and after it, so that a machine that slows down or speeds up weighs on both sides. No ablation
is asked twice, so the memory of the engine's process at the end shows whether they leave anything behind.

    python benchmarks/masked_throughput.py [--model DIR_OR_NAME] [--dtype NAME] [--rounds N] [--modes eager compiled]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from arms import Arm, CarryOut, Order, shared_arguments, spread, start, take_turns
from processes import memory_mb

PROMPT_TOKENS = 24
ANSWER_TOKENS = 8
BLOCK_SIZE = 32
ABLATED_SHARE = 0.05
DIFFERENT = (1, 16, 256, 1024)
LEAST_REQUESTS = 256
MAX_NUM_SEQS = DIFFERENT[-1] + 2  # the engine's two canaries share the steps
WAYS = {"scored": 1, "generated": ANSWER_TOKENS}
MODES = ("eager", "compiled")


def main() -> None:
    """Measures and prints; the same file serves as the child processes."""
    parser = argparse.ArgumentParser(description="Throughput of ablated requests beside stock vLLM.")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: both")
    start(parser, {"stock": _stock, "masked": _masked}, compare)


def compare(options: argparse.Namespace) -> None:
    """Measures every mode and prints."""
    print(f"{options.rounds} rounds, computed tokens/s, median (least .. most)")
    for mode in options.modes:
        compare_mode(options, mode)


def compare_mode(options: argparse.Namespace, mode: str) -> None:
    """Runs the cases one after the other and prints computed tokens per second and ratios."""
    arguments = [*shared_arguments(options), "--modes", mode]
    with Arm(__file__, "stock", arguments) as stock, Arm(__file__, "masked", arguments) as masked:
        most, different_in_all, memory = 0, 0, []
        for way, tokens in WAYS.items():
            stock.run(way=way, requests=DIFFERENT[-1])  # warms up
            memory.append(masked.run(way=way, requests=DIFFERENT[-1], different=DIFFERENT[-1])["memory_mb"])
            different_in_all += DIFFERENT[-1]
            print(f"{mode}, {way}: {PROMPT_TOKENS} + {tokens} tokens a request")
            for different in DIFFERENT:
                requests = max(LEAST_REQUESTS, different)
                order = {"way": way, "requests": requests, "different": different}
                turns = take_turns(masked, stock, order, options.rounds)
                most = max(most, *(answer["most"] for answer in turns.said))
                memory.append(turns.said[-1]["memory_mb"])
                different_in_all += different * options.rounds
                computed = np.mean([answer["done"] for answer in turns.said]) / requests
                print(
                    f"  {requests:4d} requests, {different:4d} ablations: ours {spread(turns.ours, '.0f')}, stock "
                    f"{spread(turns.stock, '.0f')}, ratio {spread(turns.ratios, '.3f')}; tokens computed a request "
                    f"{computed:.2f}, by stock {PROMPT_TOKENS + tokens - 1}",
                    flush=True,
                )
        print(
            f"{mode}: most different ablations in one step, canaries among them: {most}; memory of our process "
            f"{memory[0]:.0f} MB after the first {DIFFERENT[-1]}, {memory[-1]:.0f} MB after {different_in_all}",
            flush=True,
        )


def _prompts(requests: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(int(i) for i in rng.integers(100, 1000, PROMPT_TOKENS)) for _ in range(requests)]


def _computed(tokens: Sequence[int]) -> int:
    """Tokens that the model computed on, of requests of so many: the last of an answer is read, not computed on."""
    return sum(tokens) - len(tokens)


def _stock(options: argparse.Namespace) -> CarryOut:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from cs_localize.models import resolve

    llm = LLM(
        model=str(resolve(options.model).path),
        dtype=options.dtype,
        enforce_eager=options.modes == ["eager"],
        max_num_seqs=MAX_NUM_SEQS,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    prompts = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in _prompts(DIFFERENT[-1])]
    scored = SamplingParams(temperature=0, max_tokens=1, logprobs=0, detokenize=False)
    params = {"scored": scored, "generated": SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)}

    def run(order: Order) -> Order:
        outputs = llm.generate(prompts[: order["requests"]], params[order["way"]], use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == WAYS[order["way"]] for output in outputs)
        return {"done": _computed([PROMPT_TOKENS + WAYS[order["way"]]] * len(outputs))}

    return run


def _masked(options: argparse.Namespace) -> CarryOut:
    from cs_localize.heads import Ablation
    from cs_localize.measure.protocol import Request
    from cs_localize.measure.spec import EngineSpec
    from cs_localize.measure.vllm import VLLMEngine
    from cs_localize.models import resolve
    from cs_localize.outcomes import Item

    local = resolve(options.model)
    prompts = _prompts(DIFFERENT[-1])
    resources = {
        "max_num_seqs": MAX_NUM_SEQS,
        "block_size": BLOCK_SIZE,
        "prefix_cache": False,
        "eager": options.modes == ["eager"],
    }
    engine = VLLMEngine(
        EngineSpec("vllm", str(local.path), local.fingerprint, local.shape, options.dtype, resources=resources)
    )
    rng = np.random.default_rng(1)
    many = max(1, round(ABLATED_SHARE * local.shape.n_heads))
    answer = (int(rng.integers(100, 1000)),)

    def run(order: Order) -> Order:
        # New ablations every time, as in a search, so that none is in the table yet.
        drawn = [rng.choice(local.shape.n_heads, many, replace=False) for _ in range(order["different"])]
        ablations = [Ablation.of(local.shape.head(int(i)) for i in heads) for heads in drawn]
        requests = []
        for number, prompt in enumerate(prompts[: order["requests"]]):
            item = Item("throughput", str(number), "", "")
            ablation = ablations[number % len(ablations)]
            if order["way"] == "scored":
                requests.append(Request(item, prompt, answer, ablation))
            else:
                requests.append(Request(item, prompt, (), ablation, "generate", ANSWER_TOKENS, stop=()))
        outcomes = engine.measure(requests)
        computed = _computed([outcome.tokens for outcome in outcomes])
        most = int(engine.evidence()["most_ablations_in_a_step"])
        return {"done": computed, "most": most, "memory_mb": memory_mb()}

    return run


if __name__ == "__main__":
    main()
