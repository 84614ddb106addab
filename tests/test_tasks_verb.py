from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from cs_localize.ablate import Baseline, baselines, baselines_table
from cs_localize.cli import main
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation
from cs_localize.outcomes import Item, Outcome
from cs_localize.tasks import get_task
from tests.studies import planted_config
from tests.tasks.harness.builders import write_sum_task

ENGINE = planted_config().engine


class EvenLengths:
    """A measurer that is right on every id of an even length; the score is minus the length."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def request(self, item: Item, ablation: Ablation, mode: str) -> tuple[Item, Ablation, str]:
        return item, ablation, mode

    def measure(self, requests: Sequence[tuple[Item, Ablation, str]], stage: str) -> list[Outcome]:
        assert all(ablation == Ablation() for _, ablation, _ in requests)
        self.asked = [item.id for item, _, mode in requests if mode == "score"]
        assert self.asked == [item.id for item, _, mode in requests if mode == "generate"]
        return [Outcome(-float(len(item.id)), len(item.id) % 2 == 0, "", 3) for item, _, _ in requests]


def test_the_baselines_are_those_of_all_items_or_of_a_part_drawn_with_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurer = EvenLengths()
    session = nullcontext(SimpleNamespace(measurer=measurer))
    monkeypatch.setattr("cs_localize.ablate.unablated.open_session", lambda *_: session)

    def ids(seed: int) -> list[str]:
        baselines("m", ["plurals"], limit=20, seed=seed, ledger=tmp_path)
        return measurer.asked

    (whole,) = baselines("m", ["plurals"], ledger=tmp_path)
    words = [question.id for question in get_task("plurals").questions]
    assert measurer.asked == words
    assert (whole.items, whole.of) == (len(words), len(words))
    assert whole.accuracy == fmean(len(word) % 2 == 0 for word in words)
    assert whole.score == pytest.approx(-fmean(map(len, words)))
    assert whole.ci[0] < whole.accuracy < whole.ci[1]
    first, again, other = ids(0), ids(0), ids(1)
    assert first == again != other
    assert len(set(first)) == 20


@pytest.mark.ray
def test_baselines_come_from_the_engine_and_a_second_time_from_the_ledger(tmp_path: Path) -> None:
    first = baselines("planted", ["antonyms", "code"], limit=12, engine=ENGINE, ledger=tmp_path / "ledger")
    again = baselines("planted", ["antonyms", "code"], limit=12, engine=ENGINE, ledger=tmp_path / "ledger")

    assert first == again
    assert [(b.task, b.items) for b in first] == [("antonyms", 12), ("code", 12)]
    assert all(b.score < 0 for b in first)


def test_the_table_has_a_line_for_every_task() -> None:
    lines = baselines_table([Baseline("code", 40, 110, 0.625, (0.47, 0.758), -1.5)])

    assert len(lines) == 2
    assert lines[1].split() == ["code", "40/110", "62.5%", "47.0%", "to", "75.8%", "-1.50"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "3"], "--limit goes with --baseline"),
        (["--log-samples", "d"], "--log-samples goes with --baseline"),
        (["--model", "m"], "--model goes with --baseline"),
        (["--include-path", "d"], "--include-path goes with --baseline"),
        (["--baseline", "--include-path", "no/such"], "lm_eval.include_path: there is no folder no/such"),
        (["--baseline", "--limit", "0"], "--limit 0"),
        (["--baseline", "--seed", "-1"], "--seed -1"),
        (["--baseline", "--tasks", ","], "--tasks names no task"),
        (["--baseline", "--tasks", "antonymz"], "no task 'antonymz'"),
        (["--baseline", "--model", "no-such-model"], "no-such-model"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["tasks", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_task_of_ones_own_folder_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_sum_task(tmp_path)
    own = ("--tasks", "own_sum", "--include-path", str(tmp_path))

    assert main(["tasks", "--baseline", *own, "--model", "no-such-model"]) == 2

    assert "no-such-model" in capsys.readouterr().err, "what comes after the task"


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 1 item"):
        baselines("planted", ["antonyms"], limit=-1, engine=ENGINE, ledger=tmp_path)
