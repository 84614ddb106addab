"""Measuring as the rooms after this one see it: the ledger first, the fleet for what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from cs_localize.errors import MeasurementError
from cs_localize.heads import Ablation
from cs_localize.measure.ledger import Ledger, outcome_key
from cs_localize.measure.progress import Progress
from cs_localize.measure.protocol import Mode, Request, check_ablation
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.tokens import ItemEncoder, check_length
from cs_localize.outcomes import Item, Outcome
from cs_localize.tasks import get_task
from cs_localize.tasks.harness import HarnessTask


class Answering(Protocol):
    """What the measurer needs of a fleet."""

    discarded: int

    def __enter__(self) -> Answering:
        """Starts it."""
        ...

    def map(self, requests: Sequence[Request]) -> Iterator[tuple[range, list[Outcome]]]:
        """Answers all requests, unit by unit as they finish: positions in ``requests``, and their outcomes."""
        ...

    def evidence(self) -> dict[int, dict[str, float]]:
        """What each engine can show about its own work, by the number of its worker."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class Grader(Protocol):
    """What the measurer needs of a task; every ``Capability`` is one."""

    def outcome(self, item: Item, parts: Sequence[Outcome]) -> Outcome:
        """The outcome that bears the task's metric; see ``Capability.outcome``."""
        ...


@dataclass
class StageCount:
    """What a stage took, repeats of one request counted once.

    Attributes:
        asked: different requests.
        served: of these, answered by the ledger.
        measured: of these, answered by an engine now.
        tokens: tokens of all of them, whoever answered; the same however often the study was stopped.
        measured_tokens: tokens of those measured now.
    """

    asked: int = 0
    served: int = 0
    measured: int = 0
    tokens: int = 0
    measured_tokens: int = 0


def item_request(
    encoder: ItemEncoder, spec: EngineSpec, item: Item, ablation: Ablation, mode: Mode = "score"
) -> Request:
    """The request for one item under one ablation, tokenized.

    Unless the item says otherwise, generating stops two tokens after twice the reference answer's length: room to spell
    the answer in smaller tokens and to tell it from a longer one, and no more for a broken model to ramble in.

    Raises:
        ItemError: naming the item, if it is longer than the context or its answer has no tokens.
        UsageError: naming the item, if its answer's tokens do not continue the prompt's, the model lacks a head or
            neuron of the ablation, or it needs means that are not measured.
    """
    prompt_ids, answer_ids = encoder.encode(item)
    if item.max_tokens == 0:
        choices = encoder.choices(item)
        request = Request(item, prompt_ids, answer_ids, ablation, choices=choices, means=spec.means)
    else:
        max_tokens = item.max_tokens or 2 * len(answer_ids) + 2
        if mode == "generate":
            prompt_ids = encoder.prompt(item)
            check_length(item, len(prompt_ids) + max_tokens, encoder.context)
        request = Request(item, prompt_ids, answer_ids, ablation, mode, max_tokens, stop=item.stop, means=spec.means)
    check_ablation(request, spec.shape, spec.means)
    return request


class LedgerMeasurer:
    """The ``Measurer`` of a study: what the ledger holds is not asked again, what comes back is recorded at once.

    A ``with`` block holds the ledger for writing. The fleet starts when the first request needs it.

    Args:
        spec: the engine.
        ledger: where outcomes are kept.
        fleet: makes a fleet of that engine, not yet started.
        encoder: makes token ids of items.
        progress: shows and records how far it is.
        tasks: finds the task that grades an item, by its name.

    Attributes:
        counts: what each stage took, by its name, in the order of their first request.
    """

    def __init__(
        self,
        spec: EngineSpec,
        ledger: Ledger,
        fleet: Callable[[], Answering],
        encoder: ItemEncoder,
        progress: Progress,
        tasks: Callable[[str], Grader] = get_task,
    ) -> None:
        self.counts: dict[str, StageCount] = {}
        self._spec = spec
        self._ledger = ledger
        self._make_fleet = fleet
        self._encoder = encoder
        self._progress = progress
        self._tasks = tasks
        self._fleet: Answering | None = None
        self._discarded_before = ledger.discarded
        self._stack = ExitStack()

    def __enter__(self) -> LedgerMeasurer:
        """Takes the ledger's lock.

        Raises:
            LedgerError: if another process holds it.
        """
        self._stack.enter_context(self._ledger.lock())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.release()
            else:
                self._close_fleet()
        finally:
            self._stack.close()

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        """The request for one item under one ablation, tokenized; see ``item_request``."""
        return item_request(self._encoder, self._spec, item, ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        """Answers all requests, in their order, graded by their tasks; what the ledger holds is not asked again.

        A multiple-choice question counts as one request for every choice in ``counts`` and in the display.

        Args:
            requests: any mix of items, ablations and modes; the same request may occur more than once.
            stage: a word for the progress display and ``events.jsonl``, such as ``search``.

        Raises:
            LedgerError: if outcomes cannot be recorded.
            MeasurementError: if a request cannot be measured; what was measured before is in the ledger.
            UsageError: if a task's metric does not say right or wrong of an answer.
        """
        keys = [[outcome_key(self._spec.fingerprint, part) for part in request.parts] for request in requests]
        asked = {
            key: part
            for request, own in zip(requests, keys, strict=True)
            for key, part in zip(own, request.parts, strict=True)
        }
        missing = [request for key, request in asked.items() if key not in self._ledger]
        served = len(asked) - len(missing)
        count = self.counts.setdefault(stage, StageCount())
        count.asked += len(asked)
        count.served += served
        with self._progress.stage(stage, len(asked)):
            self._progress.advance(served, served)
            if missing:
                self._measure_missing(missing, count)
        outcomes = {key: self._recorded(key, request) for key, request in asked.items()}
        count.tokens += sum(outcome.tokens for outcome in outcomes.values())
        answers = [[outcomes[key] for key in own] for own in keys]
        programs = self._programs(requests, answers)
        if programs:  # of answers that the ledger held
            with self._progress.stage(f"{stage}: executing answers", sum(len(own) for _, own in programs)):
                self._execute(programs, self._progress.advance)
        return [self._graded(request, parts) for request, parts in zip(requests, answers, strict=True)]

    def release(self) -> None:
        """Records the fleet's evidence and ends it, which frees its cores; a later request starts another."""
        if self._fleet is None:
            return
        try:
            self._record_evidence(self._fleet)
            self._progress.event("fleet_closed", discarded=self._discarded_by(self._fleet))
        finally:
            self._close_fleet()

    def take_over(self, fleet: Answering) -> None:
        """Uses a fleet of this engine that runs already."""
        self._fleet = fleet
        self._discarded_before = fleet.discarded + self._ledger.discarded
        self._progress.event("fleet_taken_over")

    def hand_over(self) -> Answering | None:
        """Records the fleet's evidence and lets go of it without ending it; None if none runs."""
        fleet = self._fleet
        if fleet is not None:
            self._record_evidence(fleet)
            self._progress.event("fleet_handed_over", discarded=self._discarded_by(fleet))
        self._fleet = None
        return fleet

    def _discarded_by(self, fleet: Answering) -> int:
        """Outcomes that came a second time to this measurer; fleet and ledger may have served others before."""
        return fleet.discarded + self._ledger.discarded - self._discarded_before

    def _record_evidence(self, fleet: Answering) -> None:
        for worker, evidence in fleet.evidence().items():
            self._progress.event("evidence", worker=worker, **evidence)

    def _measure_missing(self, missing: Sequence[Request], count: StageCount) -> None:
        if self._fleet is None:
            self._fleet = self._make_fleet().__enter__()
        for positions, answers in self._fleet.map(missing):
            asked = [missing[position] for position in positions]
            outcomes = answers
            try:
                parts = [[answer] for answer in answers]
                self._execute(self._programs(asked, parts))
                outcomes = [
                    self._graded(request, own) if request.mode == "generate" else own[0]
                    for request, own in zip(asked, parts, strict=True)
                ]
            finally:  # what was answered is kept, whatever stops the grading; it is graded again when it is served
                self._ledger.append(self._spec.fingerprint, asked, outcomes)
            count.measured += len(outcomes)
            count.measured_tokens += sum(outcome.tokens for outcome in outcomes)
            self._progress.advance(len(outcomes))

    def _programs(
        self, requests: Sequence[Request], answers: Sequence[Sequence[Outcome]]
    ) -> list[tuple[HarnessTask, list[str]]]:
        """By task, what must be executed before these answers can be graded, and has not been."""
        written: dict[str, list[tuple[Item, Sequence[Outcome]]]] = {}
        for request, parts in zip(requests, answers, strict=True):
            if request.mode == "generate":
                written.setdefault(request.item.task, []).append((request.item, parts))
        found = []
        for name, pairs in written.items():
            task = self._tasks(name)
            if isinstance(task, HarnessTask) and (programs := task.unjudged(pairs)):
                found.append((task, programs))
        return found

    @staticmethod
    def _execute(
        programs: Sequence[tuple[HarnessTask, list[str]]], advance: Callable[[int], None] | None = None
    ) -> None:
        for task, own in programs:
            for _ in task.judge(own):
                if advance is not None:
                    advance(1)

    def _graded(self, request: Request, parts: Sequence[Outcome]) -> Outcome:
        """What the parts of a request say together. A score that is nobody's metric needs no task."""
        if request.mode == "score" and request.item.max_tokens != 0:
            return parts[0]
        return self._tasks(request.item.task).outcome(request.item, parts)

    def _recorded(self, key: bytes, request: Request) -> Outcome:
        outcome = self._ledger.get(key)
        if outcome is None:
            raise MeasurementError(
                f"{request.item.task}/{request.item.id} under {request.ablation} was asked and never answered"
            )
        return outcome

    def _close_fleet(self) -> None:
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close()
