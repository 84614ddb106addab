"""The same masks and items asked in three ways: in one continuous batch, mask by mask, in reloaded models.

- ``one batch``: the vLLM engine, all requests in one call.
- ``mask by mask``: the same engine, a call for the items of every mask, as must be done where an ablation holds for a
  whole batch.
- ``reloaded``: transformers, a model loaded for every mask with the heads' columns of ``o_proj`` zeroed, asked one
  item at a time: the way of a script that ablates by editing weights.

They take turns in two processes, one for each engine, and score the answers of the built-in word tasks. The vLLM engine
has no prefix cache, in which the second way would find what the first has left. What it measures must agree with
transformers; in bfloat16 they agree up to its noise.

    python benchmarks/batching.py [--model DIR_OR_NAME] [--dtype NAME] [--masks N] [--items N] [--rounds N]
"""

from __future__ import annotations

import argparse

import numpy as np

from arms import Arm, CarryOut, Order, rate, shared_arguments, spread, start
from cs_localize.heads import ModelShape
from cs_localize.measure.protocol import Request
from cs_localize.measure.tokens import Encoder
from cs_localize.models import resolve
from cs_localize.seeds import stream
from processes import positive
from scoring import builtin_items, random_ablation

WAYS = {"one batch": "vllm", "mask by mask": "vllm", "reloaded": "transformers"}
NOISE = 0.1  # nats, the median over all requests


def main() -> None:
    """Measures and prints; the same file serves as the child processes."""
    parser = argparse.ArgumentParser(description="Masks in one batch, one after the other, and in reloaded models.")
    parser.add_argument("--masks", type=positive, default=64, help="different masks (default 64)")
    parser.add_argument("--items", type=positive, default=8, help="items under every mask (default 8)")
    start(parser, {"vllm": _vllm, "transformers": _transformers}, compare)


def compare(options: argparse.Namespace) -> None:
    """Takes the three ways in turn and prints requests a second and ratios."""
    if options.items > (most := len(builtin_items())):
        raise SystemExit(f"batching: --items is {options.items}, and the built-in tasks have {most} items; lower it")
    arguments = [*shared_arguments(options), "--masks", str(options.masks), "--items", str(options.items)]
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    with Arm(__file__, "vllm", arguments) as vllm, Arm(__file__, "transformers", arguments) as transformers:
        arms = {"vllm": vllm, "transformers": transformers}
        for arm in arms.values():
            arm.run(way="one batch", number=0)  # warms up
        for number in range(1, options.rounds + 1):
            scores = {}
            for way, name in WAYS.items():
                answer = arms[name].run(way=way, number=number)
                scores[way] = answer["scores"]
                rates[way].append(rate(answer))
            apart = float(np.median(np.abs(np.subtract(scores["one batch"], scores["reloaded"]))))
            if not apart < NOISE:
                raise SystemExit(f"batching: vLLM and transformers differ by {apart:.3f} nats")
    print(f"{options.masks} masks, {options.items} items each, {options.rounds} rounds, median (least .. most)")
    for way, found in rates.items():
        ratios = [ours / other for ours, other in zip(rates["one batch"], found, strict=True)]
        print(f"{way:<12} {spread(found, '.2f')} requests/s, one batch is {spread(ratios, '.1f')} times as fast")
    print(f"one batch and reloaded differ by {apart:.3f} nats (median of the last round)")


def mask_requests(options: argparse.Namespace, number: int, encoder: Encoder, shape: ModelShape) -> list[list[Request]]:
    """The requests of every mask; another number draws other masks."""
    rng = stream(0, "batching", str(number))
    items = builtin_items()
    masks = []
    for _ in range(options.masks):
        ablation = random_ablation(rng, shape)
        asked = rng.choice(len(items), options.items, replace=False)
        masks.append([Request(items[item], *encoder.encode(items[item]), ablation) for item in asked])
    return masks


def _vllm(options: argparse.Namespace) -> CarryOut:
    from cs_localize.measure.spec import EngineSpec
    from cs_localize.measure.vllm import VLLMEngine

    model = resolve(options.model)
    encoder = Encoder(model.path)
    resources = {"prefix_cache": False}
    engine = VLLMEngine(
        EngineSpec("vllm", str(model.path), model.fingerprint, model.shape, options.dtype, resources=resources)
    )

    def run(order: Order) -> Order:
        masks = mask_requests(options, order["number"], encoder, model.shape)
        calls = masks if order["way"] == "mask by mask" else [[request for mask in masks for request in mask]]
        scores = [outcome.score for requests in calls for outcome in engine.measure(requests)]
        return {"done": len(scores), "scores": scores}

    return run


def _transformers(options: argparse.Namespace) -> CarryOut:
    import torch
    from transformers import AutoModelForCausalLM

    model = resolve(options.model)
    encoder = Encoder(model.path)
    size = model.shape.head_dim

    def run(order: Order) -> Order:
        scores = []
        for requests in mask_requests(options, order["number"], encoder, model.shape):
            loaded = AutoModelForCausalLM.from_pretrained(str(model.path), dtype=options.dtype)
            loaded.train(False)
            with torch.inference_mode():
                for head, _ in requests[0].ablation.heads:
                    columns = slice(head.head * size, (head.head + 1) * size)
                    loaded.model.layers[head.layer].self_attn.o_proj.weight[:, columns] = 0
                for request in requests:
                    ids = torch.tensor([[*request.prompt_ids, *request.answer_ids]])
                    rows = loaded(ids).logits[0, len(request.prompt_ids) - 1 : -1].float().log_softmax(-1)
                    scores.append(float(rows.gather(1, torch.tensor(request.answer_ids)[:, None]).sum()))
        return {"done": len(scores), "scores": scores}

    return run


if __name__ == "__main__":
    main()
