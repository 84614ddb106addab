from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from cs_localize import doctor
from cs_localize.cli import main
from cs_localize.errors import MeasurementError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.outcomes import Item, Outcome

COUNTERS = {"ablated_token_rows": 100.0, "neuron_ablated_token_rows": 20.0, "most_ablations_in_a_step": 9.0}
LINES = ("hook", "in one step", "noise floor", "in a batch", "change", "empty", "through the cache", "agreement")


def answers(scores: Sequence[float], text: str = " cold") -> list[Outcome]:
    """Scores, each followed by a generated token."""
    return [o for score in scores for o in (Outcome(score, True, "", 9), Outcome(math.nan, False, text, 9))]


def written(*texts: str) -> list[Outcome]:
    return [Outcome(math.nan, False, text, 9) for text in texts]


PLAIN, ABLATED = answers([-1.0, -2.0]), answers([-4.0, -6.0])
SOUND = doctor.Evidence(
    plain=PLAIN,
    plain_again=[PLAIN, answers([-1.01, -2.0])],
    ablated=ABLATED,
    ablated_again=answers([-4.0, -6.01]),
    counters=COUNTERS,
    exact=ABLATED,
    prefixed=answers([-3.0, -5.0])[::2],
    free=written(" cold", " down"),
    cached=96,
    oracle=answers([-4.001, -6.0]),
    oracle_prefixed=answers([-3.001, -5.0])[::2],
    stock=written(" cold", " down"),
)


def test_sound_evidence_passes_every_check_in_one_line_each() -> None:
    found = list(doctor.checks(SOUND))
    assert [passed for passed, _ in found] == [True] * len(LINES)
    assert all(word in text and "\n" not in text for word, (_, text) in zip(LINES, found, strict=True))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("hook", replace(SOUND, counters={**COUNTERS, "neuron_ablated_token_rows": 0})),
        ("in one step", replace(SOUND, counters={**COUNTERS, "most_ablations_in_a_step": 1})),
        ("noise floor", replace(SOUND, plain_again=[PLAIN, answers([-1.2, -2.0])])),
        ("in a batch", replace(SOUND, ablated_again=answers([-4.0, -6.2]))),
        ("change", replace(SOUND, ablated=PLAIN, ablated_again=PLAIN)),
        ("empty", replace(SOUND, free=written(" cold", " up"))),
        ("empty", replace(SOUND, free=[*written(" cold"), Outcome(math.nan, False, " down", 8)])),
        ("through the cache", replace(SOUND, prefixed=answers([-3.0, -3.0])[::2])),
        ("through the cache", replace(SOUND, cached=0)),
        ("agreement", replace(SOUND, oracle=answers([-4.1, -6.0]))),
        ("agreement", replace(SOUND, oracle=answers([-4.0, -6.0], " hot"))),
    ],
)
def test_a_fault_fails_its_own_check_and_no_other(line: str, fault: doctor.Evidence) -> None:
    failed = [text for passed, text in doctor.checks(fault) if not passed]
    assert [line in text for text in failed] == [True], failed


def test_tokens_from_the_cache_are_those_of_the_requests_behind_one_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose every batch but those takes 32 tokens from the cache, as a few-shot prefix would."""

    def answer(function: object, spec: EngineSpec, batches: object, **_: object) -> object:
        if function is doctor.stock_answers:
            return []
        sizes = [len(batch) for batch in cast(Sequence[Sequence[Request]], batches)]
        counts = [32.0 * min(number + 1, sum(size > 1 for size in sizes)) for number in range(len(sizes))]
        evidence = [{**COUNTERS, "cached_prompt_tokens": count} for count in counts]
        return [[Outcome(-1.0, True, "", 9)] * size for size in sizes], evidence

    monkeypatch.setattr(doctor, "run_on_worker", answer)
    monkeypatch.setattr(doctor, "fleet_size", lambda _: (1, 1, 0))
    spec = EngineSpec("vllm", "", "", ModelShape(layers=2, heads=4, kv_heads=2, head_dim=3, ffn=20))
    scored = [Request(Item("t", "1", "a", " b"), (1, 2), (3,), Ablation())] * 2
    found = doctor._gather(spec, scored, None)
    assert len(found.prefixed) == 5
    assert found.cached == 0


def test_what_the_engine_cannot_prove_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: object) -> doctor.Evidence:
        raise MeasurementError("the hook on o_proj of layer 3 scaled 0 token rows")

    monkeypatch.setattr(doctor, "_gather", lost)
    monkeypatch.setattr(doctor, "RaySession", io.StringIO)  # any context manager
    assert main(["doctor", "--model", "smollm2-135m-instruct"]) == 1
    assert "FAIL  the hook on o_proj of layer 3 scaled 0 token rows" in capsys.readouterr().out.splitlines()
