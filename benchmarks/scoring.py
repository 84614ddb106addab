"""Scoring given answers with the vLLM engine, beside what stock vLLM offers for it: ``prompt_logprobs``.

Two processes, each with its own vLLM, worker class and cache root, score the same answers to the same prompts, eager,
with a block size of 32, the same memory for keys and values and the prefix cache on. Stock vLLM is sent prompt and
answer and asked for the log-probabilities of the prompt, for which it computes the vocabulary at every token and does
not read its cache. This library's engine asks each request under a random mask, with all of its proof. The suites:

- ``built-in``: items of every built-in word task, four examples in each prompt, a mask for every request.
- ``gsm8k``, with ``--gsm8k FILE`` (lines of ``question`` and ``answer``): five examples in each prompt, which are the
  file's first, and blocks of items under the same mask, which share the examples' keys and values
  (``design.unit: request`` would share none).

First both score without an ablation, and their log-probabilities must agree. Then they take turns; a ratio compares a
run with the mean of the stock runs right before and after it.

    python benchmarks/scoring.py [--model DIR_OR_NAME] [--dtype NAME] [--rounds N] [--gsm8k FILE] [--blocks N]
                                 [--block N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from arms import Arm, CarryOut, Order, shared_arguments, spread, start, take_turns
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.protocol import Request
from cs_localize.measure.tokens import Encoder
from cs_localize.models import resolve
from cs_localize.outcomes import Item
from cs_localize.seeds import stream
from cs_localize.tasks import registered_tasks
from processes import positive

ITEMS = 16
SHOTS = 5
BLOCK_SIZE = 32
MAX_NUM_SEQS = 128
DENSITY = 0.05
NOISE = 0.05  # nats a token, the mean over all: bfloat16 in batches of other sizes


def main() -> None:
    """Measures and prints; the same file serves as the child processes."""
    parser = argparse.ArgumentParser(description="Scoring given answers, beside stock vLLM's prompt_logprobs.")
    parser.add_argument("--gsm8k", type=Path, help="gsm8k's questions and answers, one JSON object a line")
    parser.add_argument("--blocks", type=positive, default=4, help="masks of a run of gsm8k (default 4)")
    parser.add_argument("--block", type=positive, default=16, help="items of gsm8k under each mask (default 16)")
    start(parser, {"stock": _stock, "masked": _masked}, compare)


def compare(options: argparse.Namespace) -> None:
    """Runs the suites in turn and prints requests a second and ratios."""
    arguments = [*shared_arguments(options), "--blocks", str(options.blocks), "--block", str(options.block)]
    arguments += ["--gsm8k", str(options.gsm8k)] if options.gsm8k else []
    with Arm(__file__, "stock", arguments) as stock, Arm(__file__, "masked", arguments) as masked:
        for suite in ("built-in", "gsm8k") if options.gsm8k else ("built-in",):
            plain = [arm.run(suite=suite, round=0) for arm in (stock, masked)]
            apart = np.abs(np.subtract(*(answer["scores"] for answer in plain))) / plain[0]["lengths"]
            if not apart.mean() < NOISE:
                raise SystemExit(f"scoring: the two differ by {apart.mean():.3f} nats a token on {suite}")
            turns = take_turns(masked, stock, {"suite": suite}, options.rounds)
            lengths = np.array(plain[0]["lengths"])
            print(
                f"{suite}: {len(lengths)} answers of {lengths.min()} to {lengths.max()} tokens to prompts of "
                f"{np.mean(plain[0]['prompts']):.0f} on average; without an ablation the two differ by "
                f"{apart.mean():.4f} nats a token"
            )
            print(f"  prompt_logprobs  {spread(turns.stock, '.1f')} requests/s")
            print(
                f"  ours             {spread(turns.ours, '.1f')} requests/s, ratio {spread(turns.ratios, '.2f')}",
                flush=True,
            )


def suite_requests(
    options: argparse.Namespace, suite: str, masks: int, encoder: Encoder, shape: ModelShape
) -> list[Request]:
    """The requests of a suite.

    Args:
        options: of the command line.
        suite: which.
        masks: 0 for no ablations, or a number to draw fresh ones by.
        encoder: tokenizes.
        shape: whose heads.
    """
    if suite == "built-in":
        asked, block = builtin_items(), 1
    else:
        asked, block = gsm8k_items(options.gsm8k, options.block) * options.blocks, options.block
    rng = stream(0, "scoring", suite, str(masks))
    ablations = [random_ablation(rng, shape) if masks else Ablation() for _ in range(0, len(asked), block)]
    return [Request(item, *encoder.encode(item), ablations[number // block]) for number, item in enumerate(asked)]


def builtin_items() -> list[Item]:
    """Items of the built-in tasks that show examples: those whose answers are given words."""
    return [item for task in registered_tasks() if task.shots for item in task.split(0, ITEMS, 1).search]


def gsm8k_items(file: Path, count: int) -> list[Item]:
    """Questions of gsm8k behind the file's first ones with their answers."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[: SHOTS + count]]
    if len(rows) < SHOTS + count:
        raise SystemExit(f"scoring: {file} has {len(rows)} lines and {SHOTS + count} are needed; lower --block")
    texts = [f"Question: {row['question']}\nAnswer:" for row in rows]
    answers = [f" {row['answer']}" for row in rows]
    shots = "".join(f"{text}{answer}\n\n" for text, answer in zip(texts[:SHOTS], answers[:SHOTS], strict=True))
    return [
        Item("gsm8k", str(number), shots + text, answer)
        for number, (text, answer) in enumerate(zip(texts[SHOTS:], answers[SHOTS:], strict=True))
    ]


def random_ablation(rng: np.random.Generator, shape: ModelShape) -> Ablation:
    """Knocks out every head with the same small probability."""
    return Ablation.of(shape.head(int(head)) for head in np.flatnonzero(rng.random(shape.n_heads) < DENSITY))


def _stock(options: argparse.Namespace) -> CarryOut:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    model = resolve(options.model)
    encoder = Encoder(model.path)
    llm = LLM(
        model=str(model.path),
        dtype=options.dtype,
        enforce_eager=True,
        max_num_seqs=MAX_NUM_SEQS,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)

    def run(order: Order) -> Order:
        requests = suite_requests(options, order["suite"], order["round"], encoder, model.shape)
        prompts = [TokensPrompt(prompt_token_ids=[*one.prompt_ids, *one.answer_ids]) for one in requests]
        scores = []
        for request, output in zip(requests, llm.generate(prompts, params, use_tqdm=False), strict=True):
            steps = zip((output.prompt_logprobs or [])[len(request.prompt_ids) :], request.answer_ids, strict=True)
            scores.append(sum(step[token].logprob for step, token in steps if step))
        return _said(requests, scores)

    return run


def _masked(options: argparse.Namespace) -> CarryOut:
    from cs_localize.measure.spec import EngineSpec
    from cs_localize.measure.vllm import VLLMEngine

    model = resolve(options.model)
    encoder = Encoder(model.path)
    resources = {"max_num_seqs": MAX_NUM_SEQS, "block_size": BLOCK_SIZE}
    engine = VLLMEngine(
        EngineSpec("vllm", str(model.path), model.fingerprint, model.shape, options.dtype, resources=resources)
    )

    def run(order: Order) -> Order:
        requests = suite_requests(options, order["suite"], order["round"], encoder, model.shape)
        return _said(requests, [outcome.score for outcome in engine.measure(requests)])

    return run


def _said(requests: list[Request], scores: list[float]) -> Order:
    return {
        "done": len(scores),
        "scores": scores,
        "prompts": [len(request.prompt_ids) for request in requests],
        "lengths": [len(request.answer_ids) for request in requests],
    }


if __name__ == "__main__":
    main()
