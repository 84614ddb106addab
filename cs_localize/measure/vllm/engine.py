"""Requests in, outcomes out, and the proof that every one of them was measured under its ablation."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.heads import Ablation, ModelShape, Neuron
from cs_localize.measure.geometry import Share
from cs_localize.measure.protocol import Request, check_ablation, check_tokens
from cs_localize.measure.sockets import check_vllm_sockets
from cs_localize.measure.spec import EngineSpec, check_options
from cs_localize.measure.vllm.options import worker_options
from cs_localize.measure.vllm.start import check_start, in_one_line
from cs_localize.models.shape import read_shape
from cs_localize.outcomes import Item, Outcome

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.logprobs import Logprob

_SETTINGS = {"trust_remote_code", "model_impl"}
_RESOURCES = {
    "block_size",
    "eager",
    "gpu_memory_utilization",
    "kv_cache_gib",
    "max_num_batched_tokens",
    "max_num_seqs",
    "neuron_slots",
    "prefix_cache",
    "tensor_parallel",
}
_MODEL_IMPLS = ("auto", "vllm", "transformers")
_CANARY_PROMPT = tuple(range(5, 18))  # any tokens do: what counts is that they stay the same
_CANARY_TOKENS = 3  # of its answer; with the prompt fewer than a block, so that no cache serves a row
_CACHE = "the KV cache (engine.kv_cache_gib on a CPU, engine.gpu_memory_utilization on a GPU)"
_LEAST_CANARY_GAP = 0.2  # nats between the two canaries, so that bf16 noise cannot turn one into the other


class VLLMEngine:
    """vLLM in this process, with its own worker class. One engine a process at a time.

    Attributes:
        shape: geometry of the loaded model.
        fingerprint: what outcomes depend on besides the request.
        means: which head means were measured when it was loaded; that of the spec.
        architecture: vLLM's class that runs the model.
    """

    def __init__(self, spec: EngineSpec) -> None:
        """Loads the model and proves that ablations take effect.

        Settings: ``trust_remote_code`` and ``model_impl`` (``auto``, ``vllm`` or ``transformers``: whose code of the
        architecture vLLM runs). Resources: ``eager``, ``max_num_seqs``, ``max_num_batched_tokens`` (tokens of a step;
        longer prompts are cut), ``block_size``, ``gpu_memory_utilization``, ``prefix_cache``, ``neuron_slots``,
        ``tensor_parallel`` (ranks the model is split over), and ``kv_cache_gib``, which ``worker_environment`` reads.

        Raises:
            MeasurementError: if they do not, or if this model is not recognised.
            UsageError: on an unknown option, a version of vLLM that is not tested, or its V2 runner.
        """
        _check_spec(spec)
        self.shape: ModelShape = spec.shape
        self.fingerprint: str = spec.fingerprint
        self._neuron_slots = int(spec.resources.get("neuron_slots", 24))
        self.means: str = spec.means
        self._cached_tokens = 0
        self._answers_asked_again = 0
        self._broken = False
        with in_one_line("load the model"):
            self._llm = _load(spec, self._neuron_slots)
            self.architecture: str = self._llm.collective_rpc("architecture")[0]
            self._model = self._llm.llm_engine.vllm_config.model_config
            whole = getattr(self._model.hf_text_config, "max_position_embeddings", 0)
            self._limit = _CACHE if self._model.max_model_len < whole else "the model's context"
            self._dtype = str(self._model.dtype).removeprefix("torch.")
            self._measure_means(spec.mean_prompts)
            self._canaries = self._calibrate()
            self._neuron_canary = self._calibrate_neurons()

    @classmethod
    def from_spec(cls, spec: EngineSpec) -> VLLMEngine:
        """The engine of a spec."""
        return cls(spec)

    def measure(self, requests: Sequence[Request]) -> list[Outcome]:
        """Answers all requests in continuous batches; see ``Engine.measure``."""
        if self._broken:
            raise MeasurementError("an earlier call of this engine broke off, and vLLM is in mid-step; load it anew")
        for request in requests:
            check_ablation(request, self.shape, self.means)
            check_tokens(request, self._model.get_vocab_size(), self._model.max_model_len, self._limit)
        outcomes: dict[int, Outcome] = {}
        for chunk in _chunks(requests, self._neuron_slots):
            scales_neurons = any(requests[i].ablation.neurons for i in chunk)
            pairs = (*self._canaries, self._neuron_canary) if scales_neurons else self._canaries
            canaries = [canary for canary, _ in pairs]
            with in_one_line("answer"):
                answers = self._generate([requests[i] for i in chunk] + canaries)
            self._check_canaries(answers[len(chunk) :])
            self.evidence()
            outcomes.update(zip(chunk, answers[: len(chunk)], strict=True))
        return [outcomes[i] for i in range(len(requests))]

    def evidence(self) -> dict[str, float]:
        """Worker counters and canary values, after checking that every hook did all of its work."""
        with in_one_line("show what its hooks did"):
            counters: dict[str, float] = self._llm.collective_rpc("knockout_evidence")[0]
        baseline, ablated = (expected for _, expected in self._canaries)
        return {
            **counters,
            "cached_prompt_tokens": self._cached_tokens,
            "answers_asked_again": self._answers_asked_again,
            "canary_baseline": baseline,
            "canary_ablated": ablated,
            "canary_neurons": self._neuron_canary[1],
        }

    def close(self) -> None:
        """Shuts vLLM down, after which another may be loaded. Some of the memory returns when the process ends."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        cleanup_dist_env_and_memory()

    def _measure_means(self, prompts: Sequence[tuple[int, ...]]) -> None:
        if not prompts:
            return
        from vllm import SamplingParams

        self._llm.collective_rpc("measure_means", args=(True,))
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args={"ablation": ""})
        for number, prompt in enumerate(prompts):
            # Alone, so that it cannot be preempted, and with a salt of its own: every position is computed, once.
            asked: TokensPrompt = {"prompt_token_ids": list(prompt), "cache_salt": f"mean-{number}"}
            self._llm.generate([asked], [params], use_tqdm=False)
        self._llm.collective_rpc("measure_means", args=(False,))

    def _calibrate(self) -> tuple[tuple[Request, float], tuple[Request, float]]:
        """Two canaries, unablated and with every head zeroed, and what they scored at start-up.

        Their answer is what the model generates, so that what it scores there is known from another path.
        """
        answer, generated = self._generated_canary()
        pair = _canary(Ablation(), answer), _canary(Ablation.of(self.shape.all_heads()), answer)
        baseline, ablated = (outcome.score for outcome in self._generate(pair))
        gap = abs(baseline - ablated)
        if not gap > _LEAST_CANARY_GAP:
            raise no_effect("head", gap)
        check_canary("the canary", baseline, generated, "when it was generated", gap / 4, self._dtype)
        return (pair[0], baseline), (pair[1], ablated)

    def _generated_canary(self) -> tuple[tuple[int, ...], float]:
        """What the model answers to the canaries' prompt, and the log-probability of that in nats."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=_CANARY_TOKENS,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"ablation": ""},
        )
        (output,) = self._llm.generate([_prompt(_canary(Ablation(), ()))], [params], use_tqdm=False)
        entries = _entries(output)
        return tuple(token for token, _ in entries), math.fsum(entry.logprob for _, entry in entries)

    def _calibrate_neurons(self) -> tuple[Request, float]:
        """The canary of units that scale neurons: all neurons zeroed of the first layer, or of more if that is little.

        One layer's are enough for nearly every model, and a text of all neurons would be megabytes.
        """
        (plain, baseline), _ = self._canaries
        layers, gap = 0, 0.0
        while layers < self.shape.layers:
            layers = min(max(1, 2 * layers), self.shape.layers)
            neurons = (Neuron(layer, n) for layer in range(layers) for n in range(self.shape.ffn))
            canary = replace(plain, ablation=Ablation.of(neurons=neurons))
            (outcome,) = self._generate([canary])
            gap = abs(baseline - outcome.score)
            if gap > _LEAST_CANARY_GAP:
                return canary, outcome.score
        raise no_effect("neuron", gap)

    def _check_canaries(self, outcomes: Sequence[Outcome]) -> None:
        """Checks the canaries of one call: the first two, and that of neurons where it went along."""
        (_, baseline), (_, ablated) = self._canaries
        _, neurons = self._neuron_canary
        expectations = (
            ("unablated", baseline, abs(baseline - ablated)),
            ("ablated", ablated, abs(baseline - ablated)),
            ("neuron", neurons, abs(baseline - neurons)),
        )
        for outcome, (name, expected, gap) in zip(outcomes, expectations, strict=False):
            check_canary(f"the {name} canary", outcome.score, expected, "at start-up", gap / 4, self._dtype)

    def _generate(self, requests: Sequence[Request]) -> list[Outcome]:
        outputs = self._ask(requests, [_params(request) for request in requests])
        # The cache may hold first tokens of an answer too, after the same question or a choice that begins alike.
        unread = [i for i, output in enumerate(outputs) if any(math.isnan(e.logprob) for _, e in _entries(output))]
        if unread:
            self._answers_asked_again += len(unread)
            again = [requests[i] for i in unread]
            whole = self._ask(again, [_params(request, read_cache=False) for request in again])
            for i, output in zip(unread, whole, strict=True):
                outputs[i] = output
        return [_outcome(request, output) for request, output in zip(requests, outputs, strict=True)]

    def _ask(self, requests: Sequence[Request], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        try:
            outputs = self._llm.generate([_prompt(request) for request in requests], params, use_tqdm=False)
        except BaseException:  # an interrupt as well: its scheduler counts tokens that were not computed
            self._broken = True
            raise
        self._cached_tokens += sum(output.num_cached_tokens or 0 for output in outputs)
        return outputs


def no_effect(zeroed: str, gap: float) -> MeasurementError:
    """The error of an engine whose ablations change too little to be told from none.

    Args:
        zeroed: of what every one was zeroed.
        gap: nats that the canary's score changed by.
    """
    return MeasurementError(
        f"zeroing every {zeroed} moves the canary by {gap:.3f} nats, and more than {_LEAST_CANARY_GAP} is needed: "
        "ablations take no effect, or less than can be told from rounding; set engine.name to hf, or ask another model"
    )


def check_canary(name: str, scored: float, expected: float, when: str, tolerance: float, dtype: str) -> None:
    """Refuses a canary that is not where it was.

    Args:
        name: what to call it.
        scored: its score now, in nats.
        expected: its score before.
        when: when that was, for the message.
        tolerance: nats that the two must be less than apart.
        dtype: what the model computes in, whose rounding may be the cause.

    Raises:
        MeasurementError: if they are further apart, or its score is no number.
    """
    apart = abs(scored - expected)
    if apart < tolerance:
        return
    cause = "where rounding does not explain it"
    if dtype != "float32":
        cause = "whose rounding can do that; set engine.dtype to float32 to tell"
    raise MeasurementError(
        f"{name} scored {scored:.3f} nats, {expected:.3f} {when}: {apart:.3f} apart, and less than {tolerance:.3f} is "
        f"allowed, so nothing measured here counts; the model computes in {dtype}, {cause}"
    )


def _check_spec(spec: EngineSpec) -> None:
    check_options(spec, _SETTINGS, _RESOURCES)
    if (code := spec.settings.get("model_impl", "auto")) not in _MODEL_IMPLS:
        raise UsageError(f"model_impl '{code}' is not one of {', '.join(_MODEL_IMPLS)}")
    _check_ranks(spec.shape, spec.resources.get("tensor_parallel", 1))
    if spec.resources.get("tensor_parallel", 1) != 1:
        check_vllm_sockets()  # each rank is a process of its own
    check_start()
    shape = read_shape(Path(spec.model_dir))
    if shape != spec.shape:
        raise MeasurementError(f"{spec.model_dir} holds a model of shape {shape}, the spec says {spec.shape}")


def _check_ranks(shape: ModelShape, ranks: object) -> None:
    """Here and not only in the workers, which with several ranks are other processes."""
    if not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"tensor_parallel {ranks}: give a whole number from 1")
    try:
        Share.of(shape, 0, ranks)
    except MeasurementError as error:
        raise UsageError(f"tensor_parallel: {error}") from None


def _bind_ranks(ranks: int) -> None:
    """Gives each rank on a CPU cores of its own among those of this process; vLLM itself wants a NUMA node for each."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= ranks > 1:
        each = len(cores) // ranks
        lists = [",".join(map(str, cores[rank * each : (rank + 1) * each])) for rank in range(ranks)]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(lists))


def _load(spec: EngineSpec, neuron_slots: int) -> LLM:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    ranks = int(spec.resources.get("tensor_parallel", 1))
    _bind_ranks(ranks)
    from vllm import LLM

    from cs_localize.measure.vllm.gold import ForceGold

    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    resources = spec.resources
    options: dict[str, Any] = {
        "model": spec.model_dir,
        "dtype": spec.dtype,
        "trust_remote_code": bool(spec.settings.get("trust_remote_code", False)),
        "model_impl": str(spec.settings.get("model_impl", "auto")),
        "logits_processors": [ForceGold],
        "logprobs_mode": "raw_logprobs",
        "enforce_eager": bool(resources.get("eager", True)),
        "tensor_parallel_size": ranks,
        "max_model_len": -1,  # the model's, or as much of it as the KV cache has room for
        "max_num_seqs": int(resources.get("max_num_seqs", 128)),
        "block_size": int(resources.get("block_size", 32)),
        "gpu_memory_utilization": float(resources.get("gpu_memory_utilization", 0.9)),
        "enable_prefix_caching": bool(resources.get("prefix_cache", True)),
        "async_scheduling": False,  # a step's counters are read before the next is prepared
        "disable_log_stats": True,
        "seed": 0,
        **worker_options(
            spec.shape, neuron_slots + 1, means=bool(spec.mean_prompts), salted=True
        ),  # a slot more for the canary
    }
    if "max_num_batched_tokens" in resources:
        options["max_num_batched_tokens"] = int(resources["max_num_batched_tokens"])
    if ranks > 1:
        options["distributed_executor_backend"] = "mp"  # Ray would want a second place for what a worker has already
    return LLM(**options)


def _chunks(requests: Sequence[Request], neuron_slots: int) -> Iterator[list[int]]:
    """Request numbers, split so that no call holds more different neuron ablations than there are slots."""
    chunk: list[int] = []
    different: set[tuple[object, ...]] = set()
    for i in sorted(range(len(requests)), key=lambda i: requests[i].ablation.neurons):
        neurons = requests[i].ablation.neurons
        if neurons and neurons not in different and len(different) == neuron_slots:
            yield chunk
            chunk, different = [], set()
        if neurons:
            different.add(neurons)
        chunk.append(i)
    if chunk:
        yield chunk


def _canary(ablation: Ablation, answer: tuple[int, ...]) -> Request:
    return Request(Item("canary", "canary", "", ""), _CANARY_PROMPT, answer, ablation, "score")


def _prompt(request: Request) -> TokensPrompt:
    # Keys and values above the first ablated layer depend on the ablation: the salt keeps the prefix cache apart.
    answer = request.answer_ids[:-1] if request.mode == "score" else ()
    return {"prompt_token_ids": [*request.prompt_ids, *answer], "cache_salt": request.ablation.key}


def _params(request: Request, read_cache: bool = True) -> SamplingParams:
    from vllm import SamplingParams

    extra: dict[str, Any] = {"ablation": request.ablation.encode()}
    if request.mode == "generate":
        return SamplingParams(temperature=0, max_tokens=request.max_tokens, stop=list(request.stop), extra_args=extra)
    extra["gold"] = list(request.answer_ids)
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        logprobs=0,
        prompt_logprobs=0 if len(request.answer_ids) > 1 else None,
        skip_reading_prefix_cache=not read_cache,
        ignore_eos=True,
        detokenize=False,
        extra_args=extra,
    )


def _entries(output: RequestOutput) -> list[tuple[int, Logprob]]:
    """Tokens and log-probabilities of an answer: of those in the prompt, and of those that came back."""
    steps = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]  # a prompt's first has none
    return [next(iter(step.items())) for step in steps if step]


def _outcome(request: Request, output: RequestOutput) -> Outcome:
    completion = output.outputs[0]
    if completion.finish_reason not in ("stop", "length"):
        raise MeasurementError(f"vLLM broke off the answer to item {request.item.id}: {completion.finish_reason}")
    if request.mode == "generate":
        tokens = len(request.prompt_ids) + len(completion.token_ids)
        return Outcome(math.nan, False, completion.text, tokens)
    entries = _entries(output)
    scored = tuple(token for token, _ in entries)
    if scored != request.answer_ids or tuple(completion.token_ids) != request.answer_ids[-1:]:
        raise MeasurementError(f"the answer of item {request.item.id} was not scored: is the logits processor active?")
    score = math.fsum(entry.logprob for _, entry in entries)
    if not math.isfinite(score):
        raise MeasurementError(f"item {request.item.id} scored {score} under {request.ablation}")
    tokens = len(request.prompt_ids) + len(request.answer_ids)
    return Outcome(score, all(entry.rank == 1 for _, entry in entries), "", tokens)
