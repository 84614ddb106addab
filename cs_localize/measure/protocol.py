"""The one question every engine answers: what does the model say to this item under this ablation?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.outcomes import Item, Outcome

Mode = Literal["score", "generate"]


@dataclass(frozen=True)
class Request:
    """One item under one ablation, as token ids.

    Attributes:
        item: the question; engines for real models read only the token ids below.
        prompt_ids: tokens of the prompt.
        answer_ids: tokens of the reference answer, at least one.
        ablation: what is changed in the forward pass.
        mode: ``score`` teacher-forces the reference answer; ``generate`` decodes greedily up to the first stop string.
        max_tokens: most tokens to generate; unused when scoring.
        repeat: 0, or the number of a repetition that is to be measured anew, to see the engine's noise.
        stop: strings that end what is generated, and are not part of it; unused when scoring.
        choices: of a multiple-choice question the tokens of every choice and of the prompt it follows. Engines are
            never sent such a request, but one for each of its ``parts``.
        means: the ``EngineSpec.means`` whose head means the ablation is about; of no effect where it replaces no head.
    """

    item: Item
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    ablation: Ablation
    mode: Mode = "score"
    max_tokens: int = 16
    repeat: int = 0
    stop: tuple[str, ...] = ("\n",)
    choices: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    means: str = ""

    @cached_property
    def key(self) -> str:
        """Content hash of everything the model is sent (32 hex digits)."""
        limit = self.max_tokens if self.mode == "generate" else 0
        reference = self.answer_ids if self.mode == "score" else self._written_for
        text = f"{self.mode}|{limit}|{self.prompt_ids}|{reference}|{self.ablation.key}|{self.repeat}"
        if self.choices:
            text += f"|{self.choices}"
        if self.ablation.mean_heads:
            text += f"|{self.means}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def parts(self) -> tuple[Request, ...]:
        """What engines are sent: one request for every choice, or the request itself."""
        return tuple(
            replace(self, prompt_ids=prompt_ids, answer_ids=answer_ids, choices=())
            for prompt_ids, answer_ids in self.choices
        ) or (self,)

    @property
    def _written_for(self) -> str:
        """What the key of a generated answer holds besides the prompt.

        The reference answer was graded by the engines once. Keys of items that could be asked then keep it.
        """
        return self.item.answer if self.item.boundary == "strict" and self.stop == ("\n",) else f"until {self.stop}"


@runtime_checkable
class Engine(Protocol):
    """Answers requests in any order and mix.

    Attributes:
        shape: geometry of the loaded model.
        fingerprint: everything besides the request that an outcome depends on: model content, dtype, engine and
            version, settings, and the version of the intervention code. Two engines with equal fingerprints give equal
            outcomes up to hardware noise.
        means: which head means it has measured: ``EngineSpec.means``.
    """

    shape: ModelShape
    fingerprint: str
    means: str

    def measure(self, requests: Sequence[Request]) -> list[Outcome]:
        """Answers all requests, in their order. What is generated comes back as text, not graded.

        Raises:
            MeasurementError: if any outcome cannot be shown to have been measured under its ablation.
            UsageError: if an ablation names a head or neuron the model lacks, or replaces heads by means that the
                engine has not measured.
        """
        ...

    def evidence(self) -> dict[str, float]:
        """What the engine can show about its own work since it started, for the log. Keys depend on the engine."""
        ...

    def close(self) -> None:
        """Releases the model. The engine cannot be used afterwards."""
        ...


def check_ablation(request: Request, shape: ModelShape, means: str) -> None:
    """Refuses what an engine cannot do.

    Args:
        request: what is asked.
        shape: the geometry of the engine's model.
        means: the engine's ``means``.

    Raises:
        UsageError: if the ablation names a head or neuron the model lacks, or replaces heads by other means than those.
    """
    request.ablation.check(shape)
    if not request.ablation.mean_heads:
        return
    if not means:
        raise UsageError(f"'{request.ablation}' needs prompts to measure the means of heads on, and none were given")
    if request.means != means:
        raise UsageError(
            f"'{request.ablation}' is asked with the means '{request.means}', and this engine has measured '{means}'"
        )


def check_tokens(request: Request, vocabulary: int, context: int, limit: str = "the model's context") -> None:
    """Refuses what a model cannot be asked.

    Args:
        request: what is asked.
        vocabulary: how many token ids the model has.
        context: most tokens of a prompt with its answer.
        limit: what sets that, for the message.

    Raises:
        UsageError: if the prompt, or the answer to be scored, is empty, holds other token ids, or is too long; or if
            nothing is to be generated.
    """
    where = f"item '{request.item.id}' of task '{request.item.task}'"
    scored = request.mode == "score"
    if not request.prompt_ids:
        raise UsageError(f"{where} has an empty prompt; no token would predict its answer")
    if scored and not request.answer_ids:
        raise UsageError(f"{where} has an empty answer; nothing can be scored")
    if not scored and request.max_tokens < 1:
        raise UsageError(f"{where}: max_tokens must be at least 1 to generate")
    tokens = request.prompt_ids + (request.answer_ids if scored else ())
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise UsageError(f"{where} has token ids outside 0..{vocabulary - 1}; tokenize it for this model")
    length = len(tokens) + (0 if scored else request.max_tokens)
    if length > context:
        raise UsageError(f"{where} needs {length} tokens, {limit} has room for {context}")


class Measurer(Protocol):
    """What later rooms see of measuring: items in, outcomes out. The ledger and the fleet lie behind it."""

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        """The request for one item under one ablation, tokenized.

        Args:
            item: the question.
            ablation: what is changed in the forward pass.
            mode: ``score`` for the continuous score, ``generate`` for the task's own metric; of an item whose metric
                is read from scored answers both are the same request.

        Raises:
            UsageError: if the answer's tokens do not continue the prompt's, or the item does not fit the model.
        """
        ...

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        """Answers all requests, in their order, graded by their tasks; what the ledger holds is not asked again.

        Args:
            requests: any mix of items, ablations and modes; the same request may occur more than once.
            stage: a word for the progress display and ``events.jsonl``, such as ``search``.
        """
        ...
