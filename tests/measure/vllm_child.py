"""What the tests of the vLLM engine run in a process of its own: one load of the model, many questions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from cs_localize.errors import CsLocalizeError
from cs_localize.heads import Ablation, Head, Neuron
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec, load_engine
from cs_localize.outcomes import Outcome
from cs_localize.serving import ablation_args, llm_options, model_shape
from tests.measure.conformance import check_engine, check_refused_requests

Answers = dict[str, list[Outcome]]


def answer_named(spec: EngineSpec, batches: dict[str, Sequence[Request]]) -> Answers:
    """Each batch in one call."""
    engine = load_engine(spec)
    return {name: engine.measure(batch) for name, batch in batches.items()}


def damage_of_heads(spec: EngineSpec, requests: Sequence[Request], heads: Sequence[Head]) -> list[float]:
    """Mean absolute change of score, in nats, that knocking out each head alone makes."""
    engine = load_engine(spec)
    plain = engine.measure(requests)
    alone = [replace(request, ablation=Ablation.of([head])) for head in heads for request in requests]
    scores = iter(outcome.score for outcome in engine.measure(alone))
    return [sum(abs(outcome.score - next(scores)) for outcome in plain) / len(plain) for _ in heads]


def study(spec: EngineSpec, batches: dict[str, Sequence[Request]], long: Sequence[Request]) -> dict[str, Any]:
    """Everything that is asked of one engine of a real model.

    Args:
        spec: a vLLM engine.
        batches: ``ablated`` and ``plain`` are also asked one request at a time.
        long: requests with a long common prefix, two of them under different ablations first.
    """
    engine: Any = load_engine(spec)
    found: dict[str, Any] = {}
    for name, batch in batches.items():
        found[name] = engine.measure(batch)
        found[f"evidence of {name}"] = engine.evidence()
    for name in ("ablated", "plain"):
        found[f"{name} alone"] = [engine.measure([request])[0] for request in batches[name]]
    found["prefix"] = _prefix_cache(engine, long)
    found["faults"] = _faults(engine, batches["plain"][0])
    return found


def _prefix_cache(engine: Any, long: Sequence[Request]) -> dict[str, Any]:  # noqa: ANN401  # a private look inside
    found: dict[str, Any] = {}
    for name, requests in (("forwards", long), ("again", long), ("backwards", long[::-1])):
        if name != "again":
            engine._llm.reset_prefix_cache()
        found[name] = engine.measure(requests)
    found["backwards"].reverse()
    from cs_localize.measure.vllm.engine import _outcome, _params, _prompt

    def unsalted(request: Request) -> tuple[Outcome, int]:
        prompt = {**_prompt(request), "cache_salt": "the same for all"}
        (output,) = engine._llm.generate([prompt], [_params(request)], use_tqdm=False)
        return _outcome(request, output), output.num_cached_tokens

    found["unsalted"] = [unsalted(request) for request in long[:2]]
    return found


def _interrupt_next_step() -> None:
    """As a user who types Ctrl-C while the model computes."""
    from cs_localize.measure.vllm import table as tables

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    tables.active().begin_step = interrupted  # type: ignore[method-assign]


def _faults(engine: Any, request: Request) -> dict[str, str]:  # noqa: ANN401  # a private look inside
    """What each fault raises; the last two break the engine for good."""
    from cs_localize.measure.vllm import worker
    from cs_localize.measure.vllm.engine import _params, _prompt

    def call() -> None:
        engine.measure([request])

    def nameless() -> None:
        params = _params(request)
        del params.extra_args["ablation"]
        engine._llm.generate([_prompt(request)], [params], use_tqdm=False)

    unknown = {"layer": "L30H0", "head": "L0H9", "neuron": "L0N1536"}
    faults = {
        f"unknown {what}": message_of(
            lambda name=name: engine.measure([replace(request, ablation=Ablation.decode(name))])
        )
        for what, name in unknown.items()
    }
    canaries = engine._canaries
    gap = abs(canaries[0][1] - canaries[1][1])
    for name, position in (("unablated canary", 0), ("ablated canary", 1)):
        wrong = list(canaries)
        wrong[position] = (canaries[position][0], canaries[position][1] + gap / 3)
        engine._canaries = tuple(wrong)
        faults[name] = message_of(call)
    engine._canaries = canaries
    neurons = replace(request, ablation=Ablation.of(neurons=[Neuron(0, 0)]))
    canary, expected = engine._neuron_canary
    engine._neuron_canary = canary, expected + abs(canaries[0][1] - expected) / 3
    faults["neuron canary"] = message_of(lambda: engine.measure([neurons]))
    faults["neuron canary off, no neurons"] = message_of(call)
    engine._neuron_canary = canary, expected
    rows, worker.answer_rows = worker.answer_rows, _wrong_rows
    faults["answer's rows"] = message_of(engine._calibrate)
    worker.answer_rows = rows
    faults["none"] = message_of(call) + message_of(lambda: engine.measure([neurons]))
    model = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    model.get_submodule("model.layers.3.self_attn.o_proj")._forward_pre_hooks.clear()
    faults["hook removed"] = message_of(call)
    faults["no ablation named"] = message_of(nameless)
    with suppress(KeyboardInterrupt):
        _interrupt_next_step()
        call()
    faults["interrupted before"] = message_of(call)
    return faults


def message_of(call: Callable[[], object]) -> str:
    """The error a call raises, as ``Type: message``; empty if it raises none."""
    try:
        call()
    except CsLocalizeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusal(spec: EngineSpec) -> str:
    """What loading the engine raises."""
    return message_of(lambda: load_engine(spec))


def conform(spec: EngineSpec, requests: Sequence[Request], asked: Sequence[Request]) -> dict[str, Any]:
    """The conformance check, then the outcomes of some more requests, and what the compiled graph's name depends on."""
    engine: Any = load_engine(spec)
    check_engine(engine, requests, tolerance=1e-3)
    check_refused_requests(engine, requests[0])
    config = engine._llm.llm_engine.vllm_config
    names = []
    for source in ("one", "one", "another"):
        config.additional_config = {**config.additional_config, "knockout_source": source}
        names.append(config.compute_hash())
    before = engine.evidence()["answers_asked_again"]
    outcomes = engine.measure(asked)
    again = engine.evidence()["answers_asked_again"] - before
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    meeting_point = Path(worker.distributed_init_method.removeprefix("file://"))
    return {"asked": outcomes, "asked again": again, "graph names": names, "left behind": meeting_point.exists()}


def crowd(spec: EngineSpec, requests: Sequence[Request], blocks: int) -> tuple[list[Outcome], list[Outcome], set[int]]:
    """Outcomes one at a time and all at once where the KV cache holds few blocks, and which requests gave way."""
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler

    whole, preempt = vllm.LLM, Scheduler._preempt_request
    preempted: set[str] = set()

    def small(**options: object) -> vllm.LLM:
        return whole(**{**options, "num_gpu_blocks_override": blocks, "max_model_len": 64})

    def noted(self: Scheduler, request: Any, *args: object, **options: object) -> object:  # noqa: ANN401  # vLLM's
        preempted.add(request.cache_salt)
        return preempt(self, request, *args, **options)

    vllm.LLM = small
    Scheduler._preempt_request = noted
    engine = load_engine(spec)
    alone = [engine.measure([request])[0] for request in requests]
    assert not preempted
    together = engine.measure(requests)
    return alone, together, {i for i, request in enumerate(requests) if request.ablation.key in preempted}


def answer_in_what_fits(spec: EngineSpec, requests: Sequence[Request]) -> tuple[list[Outcome], str]:
    """Outcomes of a model whose context the KV cache cannot hold, and what a request of two million tokens raises."""
    engine = load_engine(spec)
    long = replace(requests[0], prompt_ids=requests[0].prompt_ids[:1] * 2_000_000)
    return engine.measure(requests), message_of(lambda: engine.measure([long]))


def answer_split(spec: EngineSpec, batch: Sequence[Request], own_process: bool) -> tuple[list[Outcome], dict[str, str]]:
    """Answers of an engine whose work is done by other processes, and what faults there raise."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(own_process))
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the function that removes a hook
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if spec.resources.get("tensor_parallel", 1) > 1 else "auto"
    engine: Any = load_engine(spec)
    outcomes = engine.measure(batch)
    (baseline, score), ablated = engine._canaries
    engine._canaries = ((baseline, score + abs(score - ablated[1]) / 3), ablated)
    faults = {"canary": message_of(lambda: engine.measure(batch[:1]))}
    engine._canaries = ((baseline, score), ablated)
    engine._llm.collective_rpc(_remove_hook)
    return outcomes, {**faults, "hook": message_of(lambda: engine.measure(batch))}


def answer_through_llm(spec: EngineSpec) -> tuple[bool, str]:
    """Whether an ``LLM`` of two ranks answers, and what it raises when the second has lost a hook."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for the function that removes a hook
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    from vllm import LLM, SamplingParams

    options = llm_options(spec.model_dir)
    llm: Any = LLM(**options, tensor_parallel_size=2, distributed_executor_backend="mp", enforce_eager=True)
    params = SamplingParams(max_tokens=1, extra_args=ablation_args(["L0H0"], model_shape(llm)))
    answered = len(llm.generate(["abc"], params, use_tqdm=False)) == 1
    llm.collective_rpc(_remove_hook)
    try:
        llm.generate(["abc"], params, use_tqdm=False)
    except Exception as error:
        return answered, f"{type(error).__name__}: {error}"
    return answered, ""


def _wrong_rows(runner: Any, golds: Any, hidden_states: Any, num_scheduled_tokens: Any) -> Any:  # noqa: ANN401
    """As ``answer_rows`` would answer if it were off by a row."""
    from cs_localize.measure.vllm.gold import answer_rows

    return answer_rows(runner, golds, hidden_states.roll(1, 0), num_scheduled_tokens)


def _remove_hook(worker: Any) -> None:  # noqa: ANN401  # vLLM's worker
    """From the last rank alone: vLLM answers with what the first has."""
    if worker.rank < worker.parallel_config.world_size - 1:
        return
    model = worker.model_runner.get_model()
    model.get_submodule("model.layers.1.self_attn.o_proj")._forward_pre_hooks.clear()
