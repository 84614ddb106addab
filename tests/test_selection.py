from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cs_localize.config import SelectConfig, SingleHeadConfig, StudyConfig
from cs_localize.confirm import confirm_heads
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.measure.planted import PlantedEngine
from cs_localize.measure.protocol import Mode, Request
from cs_localize.methods import make_method
from cs_localize.outcomes import Item, Outcome
from cs_localize.search import Search, SearchResult
from cs_localize.selection import check_items, single_head_requests
from cs_localize.tasks import first_line_equals
from tests.studies import TASKS, planted_config

SHAPE = ModelShape(layers=12, heads=8, kv_heads=8, head_dim=64, ffn=256)
BARE = "antonyms"


class Direct:
    """Asks the engine in this process, grades what it writes, and counts by stage."""

    def __init__(self, engine: PlantedEngine) -> None:
        self.engine = engine
        self.asked: dict[str, int] = {}

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        return Request(item, (len(item.task), int(item.id)), (1,), ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        self.asked[stage] = self.asked.get(stage, 0) + len(requests)
        outcomes = self.engine.measure(requests)
        return [
            replace(outcome, correct=first_line_equals(outcome.text, asked.item.answer))
            if asked.mode == "generate"
            else outcome
            for asked, outcome in zip(requests, outcomes, strict=True)
        ]


def items(tasks: Sequence[str], first: int = 0) -> dict[str, list[Item]]:
    return {task: [Item(task, str(n), f"{task} {n}:", f" {n}") for n in range(first, first + 40)] for task in tasks}


def searched(config: StudyConfig, without: Sequence[str] = (BARE,)) -> tuple[SearchResult, Direct]:
    options = {"tasks": list(TASKS), "without": list(without), "background": 0.01, "n_universal": 2}
    measurer = Direct(PlantedEngine.from_options(SHAPE, options))
    return Search(config, SHAPE, items(config.tasks), {}, measurer, make_method(config)).run(), measurer


@pytest.fixture(scope="module")
def found() -> tuple[SearchResult, Direct]:
    return searched(planted_config(select={"by": "tests", "resamples": 5}))


def test_a_task_without_localized_heads_names_none_and_says_so_and_the_others_name_theirs(
    found: tuple[SearchResult, Direct],
) -> None:
    result, measurer = found
    finding = result.findings[BARE]
    assert finding.named == []
    assert finding.reason.startswith("no localized heads: the first 10 of the ranking are passed over")
    for task in TASKS:
        if task != BARE:
            truth = [str(head) for head in measurer.engine.truth(task)]
            assert result.findings[task].named[0] == truth[0]
            assert set(result.findings[task].named) <= set(truth)


def test_named_heads_passed_their_test_and_those_that_failed_are_named_in_the_reason(
    found: tuple[SearchResult, Direct],
) -> None:
    for finding in found[0].findings.values():
        tested = {entry.head: entry for entry in finding.ranking if entry.q is not None}
        assert list(tested) == [entry.head for entry in finding.ranking[:10]]
        for head, entry in tested.items():
            assert entry.p is not None
            assert entry.q is not None
            assert entry.p <= entry.q
            if head in finding.named:
                assert entry.q <= 0.1
                assert entry.frequency is not None
                assert entry.frequency > 0.5
            elif entry.q > 0.1 and finding.named:
                assert head in finding.reason.split("not offered to the naming")[0].split(";")[-1]


def test_every_fit_has_a_p_value_and_every_head_a_frequency(found: tuple[SearchResult, Direct]) -> None:
    for finding in found[0].findings.values():
        assert finding.fit_p == 0.05, "universal heads alone make a fit better than chance"
        assert {entry.frequency for entry in finding.ranking} <= {0.0, 0.2, 0.4, 0.6, 0.8, 1.0}


def test_the_requests_of_all_tasks_are_those_asked(found: tuple[SearchResult, Direct]) -> None:
    result, measurer = found
    spent = sum(finding.requests for finding in result.findings.values())
    naming = measurer.asked["naming"] - 4 * (30 + 27)
    assert spent == 4 * 600 + measurer.asked["testing"] + naming
    assert 0 < measurer.asked["testing"] <= 4 * 10 * 24


def test_a_study_in_which_no_task_names_a_head_is_confirmed_without_a_matrix(
    found: tuple[SearchResult, Direct],
) -> None:
    result, measurer = found
    config = planted_config(confirm={"curve": 2})
    held_out = items(TASKS, 100)
    named = {task: heads if task == "plurals" else () for task, heads in result.named.items()}
    for given, rows in ((named, {"plurals"}), (dict.fromkeys(TASKS, ()), set())):
        confirm = confirm_heads(
            measurer, held_out, given, result.candidates, (), {}, SHAPE, config.confirm, 0,
            lambda requests: measurer.measure(requests, "noise"),
        )  # fmt: skip
        assert set(confirm.matrix) == set(confirm.random) == set(confirm.contrast) == rows
        assert set(confirm.curve) == set(TASKS)


def test_naming_alone_tests_nothing_and_bounds_nothing() -> None:
    select = {"by": "naming", "resamples": 0, "permutations": 0, "candidates": 5, "bootstrap": 5}
    result, measurer = searched(planted_config(select=select, design__requests=200))
    assert "testing" not in measurer.asked
    for finding in result.findings.values():
        assert finding.fit_p is None
        assert {(entry.p, entry.q, entry.frequency) for entry in finding.ranking} == {(None, None, None)}


def test_knockoffs_offer_what_they_select_and_leave_the_pilot_out() -> None:
    select = {"by": "knockoffs", "error_rate": 0.2, "resamples": 0, "permutations": 0, "bootstrap": 5}
    result, measurer = searched(planted_config(select=select, design__kind="bernoulli"), without=())
    assert "testing" not in measurer.asked
    for task, finding in result.findings.items():
        assert finding.named
        assert set(finding.named) <= set(map(str, measurer.engine.truth(task)))
        assert {entry.q for entry in finding.ranking} == {None}
    assert any("for knockoffs do not select them" in finding.reason for finding in result.findings.values())


def test_a_fit_no_better_than_chance_is_said_where_nothing_is_found() -> None:
    options = {"tasks": list(TASKS), "without": list(TASKS), "background": 0.0, "n_universal": 0}
    measurer = Direct(PlantedEngine.from_options(SHAPE, options))
    config = planted_config(select={"by": "tests", "resamples": 0, "bootstrap": 5}, design__requests=150)
    result = Search(config, SHAPE, items(TASKS), {}, measurer, make_method(config)).run()
    assert not any(result.named.values())
    said = [f.reason for f in result.findings.values() if "nor does the fit predict held-back masks better" in f.reason]
    assert len(said) == sum((f.fit_p or 0) > 0.1 for f in result.findings.values()) >= 2


def test_no_request_is_asked_twice_and_each_is_charged_to_one_task() -> None:
    candidates = {"a": (Head(0, 0), Head(1, 1)), "b": (Head(0, 0),), "c": (Head(2, 2),)}
    counts = {"a": 40, "b": 5, "c": 40}
    asked = single_head_requests(SHAPE, candidates, counts, {}, SingleHeadConfig(items=6, control_items=5))
    for design in asked.designs.values():
        assert np.all(design.masks.sum(axis=1) == 1)
        pairs = {(int(mask.argmax()), int(item)) for mask, item in zip(design.masks, design.items, strict=True)}
        assert len(pairs) == len(design)
    assert [len(design) for design in asked.designs.values()] == [6 + 6 + 3, 5 + 3 + 3, 6 + 3 + 3]
    assert np.bincount(asked.charged).tolist() == [12 + 3 + 3 + 3, 5, 3 + 6 + 3]


def test_relatives_are_not_asked_as_controls() -> None:
    candidates = {"a": (Head(0, 0),), "b": (Head(1, 0),)}
    asked = single_head_requests(SHAPE, candidates, {"a": 9, "b": 9}, {"a": ["b"]}, SingleHeadConfig(items=4))
    assert [len(design) for design in asked.designs.values()] == [4, 4]


def test_a_task_with_a_single_item_cannot_be_tested_and_can_be_named() -> None:
    with pytest.raises(UsageError, match="task 'a' has 1 search item"):
        check_items({"a": 1}, SelectConfig(by="tests"))
    check_items({"a": 1}, SelectConfig(by="naming"))
