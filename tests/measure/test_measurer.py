from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cs_localize.errors import LedgerError, MeasurementError, UsageError
from cs_localize.heads import Ablation, Head
from cs_localize.measure.ledger import Ledger, outcome_key
from cs_localize.measure.measurer import LedgerMeasurer
from cs_localize.measure.progress import Progress
from cs_localize.measure.protocol import Measurer, Mode, Request
from cs_localize.measure.tokens import WordEncoder
from cs_localize.outcomes import Item, Outcome
from tests.measure.toy import toy_item, toy_outcome, toy_requests, toy_spec

STUDY = toy_spec()


class FleetInProcess:
    """Answers in units of three, last unit first, and remembers what it was asked."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.asked: list[Request] = []
        self.starts = 0
        self.closed = 0
        self.discarded = 0
        self._fail_after = fail_after

    def __enter__(self) -> FleetInProcess:
        self.starts += 1
        return self

    def map(self, requests: Sequence[Request]) -> Iterator[tuple[range, list[Outcome]]]:
        for unit, start in enumerate(reversed(range(0, len(requests), 3))):
            if unit == self._fail_after:
                raise MeasurementError("the canary is off")
            positions = range(start, min(start + 3, len(requests)))
            self.asked += [requests[position] for position in positions]
            yield positions, [toy_outcome(requests[position]) for position in positions]

    def evidence(self) -> dict[int, dict[str, float]]:
        return {3: {"calls": 1.0}}

    def close(self) -> None:
        self.closed += 1


def measurer(tmp_path: Path, fleet: FleetInProcess) -> LedgerMeasurer:
    progress = Progress(tmp_path / "events.jsonl", io.StringIO())
    return LedgerMeasurer(STUDY, Ledger(tmp_path / "ledger"), lambda: fleet, WordEncoder(), progress)


def scores(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.score for outcome in outcomes]


def events(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]


def test_it_is_a_measurer(tmp_path: Path) -> None:
    as_protocol: Measurer = measurer(tmp_path, FleetInProcess())
    assert as_protocol.request(toy_item(1), Ablation()).ablation.empty


def test_outcomes_come_in_the_order_asked_whatever_order_units_finish_in(tmp_path: Path) -> None:
    requests = toy_requests(10)
    with measurer(tmp_path, FleetInProcess()) as study:
        assert scores(study.measure(requests, "search")) == scores(list(map(toy_outcome, requests)))


def test_a_request_asked_twice_is_measured_once(tmp_path: Path) -> None:
    requests = toy_requests(4)
    fleet = FleetInProcess()
    with measurer(tmp_path, fleet) as study:
        outcomes = study.measure([*requests, *requests], "search")
        study.measure(requests[1:3], "confirm")
    assert scores(outcomes[:4]) == scores(outcomes[4:])
    assert len(fleet.asked) == 4
    assert (study.counts["search"].asked, study.counts["search"].served, study.counts["search"].measured) == (4, 0, 4)
    assert (study.counts["confirm"].asked, study.counts["confirm"].served, study.counts["confirm"].measured) == (
        2,
        2,
        0,
    )


def test_what_the_ledger_holds_needs_no_fleet_and_costs_the_same_tokens(tmp_path: Path) -> None:
    requests = toy_requests(5)
    with measurer(tmp_path, FleetInProcess()) as study:
        before = study.measure(requests, "search")
        first = study.counts["search"]
    fleet = FleetInProcess()
    with measurer(tmp_path, fleet) as study:
        after = study.measure(requests, "search")
        second = study.counts["search"]
    assert before == after
    assert fleet.starts == 0
    assert first.tokens == second.tokens == 30
    assert (first.measured_tokens, second.measured_tokens) == (30, 0)


def test_what_was_measured_before_a_failure_is_kept_and_the_fleet_is_closed(tmp_path: Path) -> None:
    requests = toy_requests(9)
    fleet = FleetInProcess(fail_after=2)
    with pytest.raises(MeasurementError, match="the canary is off"), measurer(tmp_path, fleet) as study:
        study.measure(requests, "search")
    assert fleet.closed == 1
    again = FleetInProcess()
    with measurer(tmp_path, again) as study:
        assert scores(study.measure(requests, "search")) == scores(list(map(toy_outcome, requests)))
    assert again.asked == requests[:3]
    assert [event["event"] for event in events(tmp_path)].count("stage_stopped") == 1


def test_a_fleet_that_leaves_requests_unanswered_is_an_error(tmp_path: Path) -> None:
    class Forgetful(FleetInProcess):
        def map(self, requests: Sequence[Request]) -> Iterator[tuple[range, list[Outcome]]]:
            return super().map(requests[:-1])

    with (
        pytest.raises(MeasurementError, match=r"toy/3 under .* was asked and never answered"),
        measurer(tmp_path, Forgetful()) as study,
    ):
        study.measure(toy_requests(4), "search")


def test_releasing_frees_the_cores_records_the_evidence_and_a_later_request_starts_again(tmp_path: Path) -> None:
    fleet = FleetInProcess()
    with measurer(tmp_path, fleet) as study:
        study.measure(toy_requests(3), "search")
        study.release()
        assert (fleet.starts, fleet.closed) == (1, 1)
        study.release()
        study.measure(toy_requests(3, first=3), "search")
    assert (fleet.starts, fleet.closed) == (2, 2)
    assert study.counts["search"].measured == 6
    recorded = [event for event in events(tmp_path) if event["event"] == "evidence"]
    assert len(recorded) == 2
    assert (recorded[0]["worker"], recorded[0]["calls"]) == (3, 1.0)


def test_two_measurers_of_two_processes_may_not_share_a_ledger_folder(tmp_path: Path) -> None:
    with measurer(tmp_path, FleetInProcess()):
        other = measurer(tmp_path, FleetInProcess())
        with pytest.raises(LedgerError, match="another study"):
            other.__enter__()


def test_two_engines_of_one_study_share_its_ledger_and_not_their_outcomes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    progress = Progress(None, io.StringIO())
    fleets = [FleetInProcess(), FleetInProcess()]
    other = toy_spec()
    object.__setattr__(other, "dtype", "float32")
    with (
        LedgerMeasurer(STUDY, ledger, lambda: fleets[0], WordEncoder(), progress) as first,
        LedgerMeasurer(other, ledger, lambda: fleets[1], WordEncoder(), progress) as second,
    ):
        first.measure(toy_requests(2), "search")
        second.measure(toy_requests(2), "search")
    assert len(ledger) == 4
    assert [len(fleet.asked) for fleet in fleets] == [2, 2]


def test_a_head_the_model_lacks_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="L9H0 is out of range"):
        measurer(tmp_path, FleetInProcess()).request(toy_item(0), Ablation.of([Head(9, 0)]))


def test_generation_leaves_room_for_twice_the_answer_and_two_tokens_more(tmp_path: Path) -> None:
    study = measurer(tmp_path, FleetInProcess())
    long = Item("toy", "long", "say", " word" * 20)
    assert study.request(toy_item(0), Ablation(), "generate").max_tokens == 6
    assert study.request(long, Ablation(), "generate").max_tokens == 42


def test_generation_beyond_the_context_is_refused(tmp_path: Path) -> None:
    encoder = WordEncoder()
    encoder.context = 9
    study = LedgerMeasurer(STUDY, Ledger(tmp_path), FleetInProcess, encoder, Progress(None, io.StringIO()))
    with pytest.raises(UsageError, match="toy/0 takes 10 tokens and the model's context has 9"):
        study.request(toy_item(0), Ablation(), "generate")


def test_a_fleet_that_is_handed_over_goes_on_in_the_next_measurer(tmp_path: Path) -> None:
    fleet, other = FleetInProcess(), FleetInProcess()
    requests = toy_requests(8)
    with measurer(tmp_path, fleet) as first:
        first.measure(requests[:4], "search")
        fleet.discarded = 3
        running = first.hand_over()
    assert running is fleet
    assert fleet.closed == 0

    with measurer(tmp_path, other) as second:
        second.take_over(running)
        second.measure(requests, "search")
        fleet.discarded += 2

    assert len(fleet.asked) == 8
    assert (fleet.starts, fleet.closed, other.starts) == (1, 1, 0)
    assert sum(event["event"] == "evidence" for event in events(tmp_path)) == 2
    assert [event["discarded"] for event in events(tmp_path) if "discarded" in event] == [3, 2], "each its own"


def test_a_measurer_that_started_no_fleet_has_none_to_hand_over(tmp_path: Path) -> None:
    with measurer(tmp_path, FleetInProcess()) as study:
        assert study.hand_over() is None


class LastChoice:
    """Grades a choice right where the last one scores best."""

    def outcome(self, item: Item, parts: Sequence[Outcome]) -> Outcome:
        scores = [part.score for part in parts]
        return Outcome(max(scores), scores[-1] == max(scores), "", sum(part.tokens for part in parts))


class ChoiceEncoder(WordEncoder):
    """Two words a choice."""

    def choices(self, item: Item) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        return tuple(((7, 7), (number,)) for number, _ in enumerate(item.choices))


@pytest.mark.parametrize("mode", ["score", "generate"])
def test_a_choice_is_one_request_of_several_sequences_and_is_graded_by_its_task(mode: Mode, tmp_path: Path) -> None:
    fleet = FleetInProcess()
    asking = LedgerMeasurer(
        STUDY,
        Ledger(tmp_path / "ledger"),
        lambda: fleet,
        ChoiceEncoder(),
        Progress(None, io.StringIO()),
        {"toy": LastChoice()}.__getitem__,
    )
    items = [
        Item("toy", str(n), "which?", " a", choices=(("which?", " a"),) * 3, gold=(0,), max_tokens=0) for n in range(2)
    ]
    with asking as study:
        requests = [study.request(item, Ablation.of([Head(0, n)]), mode) for n, item in enumerate(items)]
        outcomes = study.measure(requests, "search")
        again = study.measure(requests, "naming")
    assert {request.mode for request in fleet.asked} == {"score"}
    assert len(fleet.asked) == 6, "three sequences an item, asked once for both stages"
    assert (study.counts["search"].asked, study.counts["search"].measured, study.counts["naming"].served) == (6, 6, 6)
    for request, outcome in zip(requests, outcomes, strict=True):
        scores = [toy_outcome(part).score for part in request.parts]
        assert outcome.score == max(scores)
        assert outcome.correct == (scores[2] == max(scores))
        assert outcome.tokens == 9
    assert study.counts["search"].tokens == sum(outcome.tokens for outcome in outcomes)
    assert again == outcomes


def test_generated_text_is_graded_by_the_task_and_recorded_with_its_grade(tmp_path: Path) -> None:
    class Writer(FleetInProcess):
        def map(self, requests: Sequence[Request]) -> Iterator[tuple[range, list[Outcome]]]:
            for positions, _ in super().map(requests):
                yield positions, [Outcome(float("nan"), False, " cold\nhot", 4) for _ in positions]

    ledger = Ledger(tmp_path / "ledger")
    progress = Progress(None, io.StringIO())
    items = [Item("antonyms", "hot", "hot ->", " cold"), Item("antonyms", "up", "up ->", " down")]
    with LedgerMeasurer(STUDY, ledger, Writer, WordEncoder(), progress) as study:
        requests = [study.request(item, Ablation(), "generate") for item in items]
        assert [outcome.correct for outcome in study.measure(requests, "confirm")] == [True, False]
    recorded = [ledger.get(outcome_key(STUDY.fingerprint, request)) for request in requests]
    assert [outcome is not None and outcome.correct for outcome in recorded] == [True, False]


def test_only_a_request_that_replaces_heads_is_asked_again_where_the_means_are_others(tmp_path: Path) -> None:
    first = replace(STUDY, mean_prompts=((1, 2), (3,)))
    specs = [first, replace(STUDY, mean_prompts=((3,), (1, 2))), replace(STUDY, mean_prompts=((1, 2),))]
    ledger = Ledger(tmp_path / "ledger")
    asked = []
    for spec in specs:
        fleet = FleetInProcess()
        progress = Progress(None, io.StringIO())
        with LedgerMeasurer(spec, ledger, partial(FleetInProcess.__enter__, fleet), WordEncoder(), progress) as m:
            changes = [Ablation(), Ablation.of([Head(0, 1)]), Ablation.to_mean([Head(0, 1)])]
            m.measure([m.request(toy_item(0), change) for change in changes], "search")
        asked.append([str(request.ablation) for request in fleet.asked])
    assert sorted(asked[0]) == ["L0H1", "L0H1=mean", "none"]
    assert asked[1:] == [[], ["L0H1=mean"]]


def test_without_prompts_for_means_no_head_is_replaced(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'L0H1=mean' needs prompts to measure the means of heads on"):
        measurer(tmp_path, FleetInProcess()).request(toy_item(0), Ablation.to_mean([Head(0, 1)]))


def test_the_key_of_a_request_that_replaces_nothing_is_what_it_always_was() -> None:
    item = Item("antonyms", "hot", "hot ->", " cold")
    request = Request(item, (1, 2), (3,), Ablation.decode("L4H2,L7H0=0.5"), means="0123456789abcdef")
    assert request.key == "e76923c81544fe1507e14421e3f79a44"


def test_an_empty_prompt_has_no_mean() -> None:
    with pytest.raises(UsageError, match="is empty"):
        replace(STUDY, mean_prompts=((1,), ()))
