"""The hf engine: transformers, batched, an ablation for every row. The oracle the fast engine is checked against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers

from cs_localize.errors import MeasurementError, UsageError, one_line
from cs_localize.measure.hooks import AblationHooks
from cs_localize.measure.protocol import Mode, Request, check_ablation, check_tokens
from cs_localize.measure.spec import EngineSpec, check_options
from cs_localize.models.files import fingerprint
from cs_localize.models.shape import read_shape
from cs_localize.outcomes import Outcome

_SETTINGS = {"device", "attention", "trust_remote_code"}
_RESOURCES = {"threads", "batch_size"}
_CHECKED_TOKENS = 4  # any do: the geometry of a layer is the same for all
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers write for bytes that make no character."""


class HFEngine:
    """Answers requests with transformers, rows of a batch under different ablations.

    Attributes:
        shape: geometry of the loaded model.
        fingerprint: what an outcome depends on besides the request; equal to that of the spec.
        means: which head means were measured when it was loaded; that of the spec.
        model: the decoder, in evaluation mode, its parameters frozen.
        hooks: what scales heads and neurons, for callers that run the model themselves.
    """

    def __init__(self, model_dir: str | Path, dtype: str = "auto", batch_size: int = 32, device: str = "cpu") -> None:
        """Loads a local model; see ``from_spec`` for every option.

        Args:
            model_dir: directory of the model.
            dtype: ``auto`` (the model's own), ``bfloat16`` or ``float32``.
            batch_size: most requests in one forward pass.
            device: ``cpu`` or a CUDA device.

        Raises:
            UsageError: if there is no such model, device or dtype.
            MeasurementError: if the model's layers are not ones whose heads and neurons can be scaled.
        """
        directory = Path(model_dir)
        settings = {} if device == "cpu" else {"device": device}
        shape = read_shape(directory)
        spec = EngineSpec(
            "hf", str(directory), fingerprint(directory), shape, dtype, settings, {"batch_size": batch_size}
        )
        self._load(spec)

    @classmethod
    def from_spec(cls, spec: EngineSpec) -> HFEngine:
        """Loads the engine a spec describes.

        Settings: ``device`` (default ``cpu``), ``attention`` (``sdpa`` or ``eager``), ``trust_remote_code``. Resources:
        ``threads`` (of torch, in this process) and ``batch_size``.

        Raises:
            UsageError: on an unknown setting, or if the model or device does not exist.
            MeasurementError: if the model is not the one described, or cannot be ablated.
        """
        engine = cls.__new__(cls)
        engine._load(spec)
        return engine

    def _load(self, spec: EngineSpec) -> None:
        _check_spec(spec)
        if threads := spec.resources.get("threads"):
            torch.set_num_threads(int(threads))
        self._batch_size = int(spec.resources.get("batch_size", 32))
        self._directory = spec.model_dir
        self._trust = bool(spec.settings.get("trust_remote_code", False))
        self.fingerprint = spec.fingerprint
        self.shape = read_shape(Path(spec.model_dir))
        if self.shape != spec.shape:
            raise MeasurementError(f"{spec.model_dir} holds a model of shape {self.shape}, the spec says {spec.shape}")
        self.model = _load_model(spec)
        self.hooks = AblationHooks(self.model, self.shape)
        some = self._tensor([list(range(min(_CHECKED_TOKENS, self.model.config.get_text_config().vocab_size)))])
        self.hooks.check_contributions(partial(self.model, input_ids=some, use_cache=False))
        self._requests = {"score": 0, "generate": 0}
        self.means = spec.means
        if spec.mean_prompts:
            self.hooks.measure_means(self._mean_batches(spec.mean_prompts))

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            UsageError: if the model directory has none.
        """
        try:
            return transformers.AutoTokenizer.from_pretrained(
                self._directory, local_files_only=True, trust_remote_code=self._trust
            )
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot load a tokenizer from {self._directory}: {one_line(error)}") from None

    def measure(self, requests: Sequence[Request]) -> list[Outcome]:
        """Answers all requests, in their order.

        Scores are sums of float32 log-softmax entries, in nats. Requests of like length share a forward pass; what else
        is in it changes an outcome by floating-point noise only.

        Raises:
            MeasurementError: if the hooks of a layer did not run exactly once in every forward pass.
            UsageError: if an ablation names a head or neuron the model lacks, or a request does not fit the model.
        """
        for request in requests:
            self.check(request)
        outcomes: dict[int, Outcome] = {}
        for batch in self._batches(requests, "score"):
            outcomes.update(zip(batch, self._score([requests[i] for i in batch]), strict=True))
        for batch in self._batches(requests, "generate"):
            chosen = [requests[i] for i in batch]
            written = [self._outcome(r, ids) for r, ids in zip(chosen, self._generate(chosen), strict=True)]
            outcomes.update(zip(batch, written, strict=True))
        return [outcomes[i] for i in range(len(requests))]

    def generate_ids(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Greedy continuations under each request's ablation, in order, whatever the request's mode.

        A continuation ends with the token that brings the first stop string, with an end-of-sequence token, or after
        ``max_tokens``; the ending token is included.
        """
        wanted = [replace(request, mode="generate") for request in requests]
        for request in wanted:
            self.check(request)
        result: dict[int, tuple[int, ...]] = {}
        for batch in self._batches(wanted, "generate"):
            result.update(zip(batch, self._generate([wanted[i] for i in batch]), strict=True))
        return [result[i] for i in range(len(wanted))]

    def check(self, request: Request) -> None:
        """Raises UsageError if the request does not fit the model: unknown heads or tokens, no prompt, too long."""
        check_ablation(request, self.shape, self.means)
        config = self.model.config.get_text_config()
        check_tokens(request, config.vocab_size, config.max_position_embeddings)

    def _mean_batches(
        self, prompts: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
        """Forward passes over all prompts, padded on the right, and the positions that are no padding."""
        ordered = sorted(prompts, key=len)
        for start in range(0, len(ordered), self._batch_size):
            batch = ordered[start : start + self._batch_size]
            longest = len(batch[-1])
            ids = self._tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in batch])
            mask = torch.arange(longest, device=ids.device) < self._tensor([len(prompt) for prompt in batch])[:, None]
            forward = torch.no_grad()(partial(self._forward, input_ids=ids, use_cache=False, logits_to_keep=1))
            yield mask, forward

    def evidence(self) -> dict[str, float]:
        """Forward passes and hook calls proven, requests answered by mode."""
        return {
            "forwards": self.hooks.forwards,
            "hook_calls": self.hooks.calls,
            "scored": self._requests["score"],
            "generated": self._requests["generate"],
        }

    def close(self) -> None:
        """Releases the model. The engine cannot be used afterwards."""
        self.hooks.remove()
        del self.model, self.hooks

    def _batches(self, requests: Sequence[Request], mode: Mode) -> list[list[int]]:
        """Positions of the requests of one mode, in batches of like length."""
        chosen = [i for i, request in enumerate(requests) if request.mode == mode]
        chosen.sort(key=lambda i: len(requests[i].prompt_ids) + len(requests[i].answer_ids))
        return [chosen[start : start + self._batch_size] for start in range(0, len(chosen), self._batch_size)]

    def _forward(self, **inputs: object) -> torch.Tensor:
        with self.hooks.proven():
            logits: torch.Tensor = self.model(**inputs).logits
        return logits

    def answer_logits(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """What predicts every answer token, in one forward pass under whatever the hooks apply to its rows.

        Padding stands on the right, where causal attention keeps it out of every real token's sight.

        Returns:
            For every request ``[answer tokens, vocabulary]`` in float32.

        Raises:
            MeasurementError: if the hooks of a layer did not run exactly once.
        """
        sequences = [request.prompt_ids + request.answer_ids[:-1] for request in requests]
        longest = max(map(len, sequences))
        ids = self._tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences])
        positions = [range(len(r.prompt_ids) - 1, len(s)) for r, s in zip(requests, sequences, strict=True)]
        kept = sorted(set().union(*positions))
        logits = self._forward(input_ids=ids, use_cache=False, logits_to_keep=self._tensor(kept))
        rows = [[kept.index(position) for position in where] for where in positions]
        return [logits[row, where].float() for row, where in enumerate(rows)]

    @torch.no_grad()
    def _score(self, requests: Sequence[Request]) -> list[Outcome]:
        with self.hooks.applied([request.ablation for request in requests]):
            logits = self.answer_logits(requests)
        outcomes = []
        for request, mine in zip(requests, logits, strict=True):
            answer = self._tensor(list(request.answer_ids))
            score = float(mine.log_softmax(-1).gather(1, answer[:, None]).sum())
            if not math.isfinite(score):
                raise MeasurementError(f"item {request.item.id} scored {score} under {request.ablation}")
            correct = bool((mine.argmax(-1) == answer).all())
            outcomes.append(Outcome(score, correct, "", len(request.prompt_ids) + len(request.answer_ids)))
        self._requests["score"] += len(requests)
        return outcomes

    @torch.no_grad()
    def _generate(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Padding stands on the left, masked, so that all rows write into the same column."""
        longest = max(len(request.prompt_ids) for request in requests)
        padding = [longest - len(request.prompt_ids) for request in requests]
        ids = self._tensor([[*[0] * pad, *r.prompt_ids] for pad, r in zip(padding, requests, strict=True)])
        mask = (torch.arange(longest, device=ids.device) >= self._tensor(padding)[:, None]).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = transformers.DynamicCache(config=self.model.config)
        written: list[list[int]] = [[] for _ in requests]
        ended = [False] * len(requests)
        with self.hooks.applied([request.ablation for request in requests]):
            while True:
                state = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
                logits = self._forward(input_ids=ids, use_cache=True, logits_to_keep=1, **state)
                chosen = logits[:, -1].argmax(-1)
                for row, token in enumerate(chosen.tolist()):
                    if not ended[row]:
                        written[row].append(token)
                        ended[row] = self._ends(requests[row], written[row])
                if all(ended):
                    return [tuple(row) for row in written]
                ids = chosen[:, None]
                mask = torch.cat([mask, mask.new_ones(len(requests), 1)], 1)
                positions = positions[:, -1:] + 1

    def _ends(self, request: Request, ids: list[int]) -> bool:
        if len(ids) >= request.max_tokens or ids[-1] in self.stop_ids:
            return True
        text = self._text(ids)  # the longer one, and the sooner made: what holds no stop string needs no second look
        return any(stop in text and stop in self.decode(ids) for stop in request.stop)

    def _outcome(self, request: Request, ids: tuple[int, ...]) -> Outcome:
        text = self.decode(ids)
        for stop in request.stop:
            text = text.partition(stop)[0]
        self._requests["generate"] += 1
        return Outcome(float("nan"), False, text, len(request.prompt_ids) + len(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, special tokens left out, up to a character that the last ones leave unfinished.

        The tokens that it is spread over are left out whole, as vLLM's detokenizer leaves them.
        """
        count = len(ids)
        while (text := self._text(ids[:count])).endswith(_UNFINISHED):
            count -= 1
        return text

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """End-of-sequence tokens: the model's generation config's and the tokenizer's."""
        declared = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = declared if isinstance(declared, list) else [declared]
        return frozenset(i for i in [*ids, self.tokenizer.eos_token_id] if isinstance(i, int))

    def _tensor(self, values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.model.device)


def _check_spec(spec: EngineSpec) -> None:
    if spec.name != "hf":
        raise UsageError(f"the hf engine cannot be made from a spec of engine '{spec.name}'")
    check_options(spec, _SETTINGS, _RESOURCES)
    if int(spec.resources.get("batch_size", 1)) < 1:
        raise UsageError("batch_size must be at least 1")
    if spec.settings.get("attention", "sdpa") not in ("sdpa", "eager"):
        raise UsageError(f"attention '{spec.settings['attention']}' is not one of sdpa, eager")
    device = str(spec.settings.get("device", "cpu"))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"device '{device}' is not available: torch sees no GPU; use device cpu")


def _load_model(spec: EngineSpec) -> transformers.PreTrainedModel:
    """The decoder in evaluation mode with frozen parameters; nothing is fetched."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # not annotated there
    try:
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
            spec.model_dir,
            dtype=spec.dtype,
            attn_implementation=spec.settings.get("attention", "sdpa"),
            trust_remote_code=bool(spec.settings.get("trust_remote_code", False)),
            local_files_only=True,
        )
        torch.nn.Module.to(model, str(spec.settings.get("device", "cpu")))
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"cannot load the model in {spec.model_dir}: {one_line(error)}") from None
    model.train(False)
    model.requires_grad_(False)
    return model
