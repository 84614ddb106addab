"""Which items a study asks, which it leaves out, and how it says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from cs_localize.asking import ask_items, check_options, load_tasks
from cs_localize.config import StudyConfig, parse_study
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation
from cs_localize.measure.protocol import Mode, Request
from cs_localize.measure.tokens import ItemError, check_length
from cs_localize.outcomes import Item, Outcome
from cs_localize.tasks import Capability
from tests.tasks.harness.builders import write_choice_task, write_sum_task, write_word_task


@dataclass
class WordMeasurer:
    """Counts words as tokens; the model writes the right sum where the first number is even, and a wrong one else."""

    context: int = 10_000
    asked: list[Request] = field(default_factory=list)

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        if not item.answer.strip():
            raise ItemError(item, ": the answer is empty", "an answer without tokens")
        check_length(item, len(f"{item.prompt} {item.answer}".split()), self.context)
        return Request(item, (1,), (2,), ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        self.asked += requests
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Outcome:
        first, second = (int(word) for word in request.item.prompt.rpartition("Q: ")[2].split()[0:3:2])
        right = first % 2 == 0
        return Outcome(math.nan, right, f" is {first + second}, I say" if right else " 0", 3)


def study(folder: Path, *tasks: str, **changes: object) -> StudyConfig:
    lm_eval = {"include_path": str(folder), **changes.pop("lm_eval", {})}  # type: ignore[dict-item]  # a mapping
    return parse_study({"model": "none", "tasks": list(tasks), "lm_eval": lm_eval, **changes})


def tasks_of(config: StudyConfig) -> dict[str, Capability]:
    return load_tasks((*config.tasks, *config.controls), config.lm_eval, config.model, config.engine)


def test_built_in_tasks_and_those_of_lm_eval_are_asked_side_by_side(tmp_path: Path) -> None:
    write_choice_task(tmp_path)
    config = study(tmp_path, "antonyms", "own_choice", controls=["copying"], search_items=5, held_out_items=4)
    asked = ask_items(config, tasks_of(config), WordMeasurer())
    assert {name: len(items) for name, items in asked.search.items()} == {"antonyms": 5, "own_choice": 5}
    assert {name: len(items) for name, items in asked.held_out.items()} == dict.fromkeys(
        ("antonyms", "own_choice", "copying"), 4
    )
    assert asked.left_out == {}
    assert asked.warnings == []


def test_items_longer_than_the_context_are_left_out_by_rule_and_counted(tmp_path: Path) -> None:
    write_word_task(tmp_path)
    text = (tmp_path / "own_word.jsonl").read_text().splitlines()
    text[3] = text[3].replace("a dog", "a " + "dog " * 50) if "dog" in text[3] else text[3].replace("a ", "a very " * 9)
    (tmp_path / "own_word.jsonl").write_text("\n".join(text) + "\n")
    config = study(tmp_path, "own_word")
    asked = ask_items(config, tasks_of(config), WordMeasurer(context=20))
    assert asked.left_out == {"own_word": {"3": "longer than the model's context of 20 tokens"}}
    assert asked.warnings == ["own_word: 1 items left out: 1 for longer than the model's context of 20 tokens"]
    kept = {item.id for item in (*asked.search["own_word"], *asked.held_out["own_word"])}
    assert kept == {str(number) for number in range(11)} - {"3"}


def test_a_side_of_which_nothing_is_left_is_an_error_with_the_reason(tmp_path: Path) -> None:
    write_word_task(tmp_path)
    config = study(tmp_path, "own_word")
    with pytest.raises(UsageError, match=r"'own_word': every item of a side is left out: longer than .* 3 tokens"):
        ask_items(config, tasks_of(config), WordMeasurer(context=3))


def test_an_answer_without_tokens_is_left_out(tmp_path: Path) -> None:
    write_sum_task(tmp_path)
    text = (tmp_path / "own_sum.jsonl").read_text().splitlines()
    text[9] = '{"sum": "9 + 9", "answer": ""}'
    (tmp_path / "own_sum.jsonl").write_text("\n".join(text) + "\n")
    config = study(tmp_path, "own_sum")
    asked = ask_items(config, tasks_of(config), WordMeasurer())
    assert asked.left_out == {"own_sum": {"9": "an answer without tokens"}}


def test_with_reference_self_the_models_own_right_answers_are_scored_and_the_others_left_out(tmp_path: Path) -> None:
    write_sum_task(tmp_path)
    write_choice_task(tmp_path)
    gold = study(tmp_path, "own_sum", "own_choice", "antonyms")
    own = study(tmp_path, "own_sum", "own_choice", "antonyms", lm_eval={"reference": "self"})
    tasks, measurer = tasks_of(own), WordMeasurer()
    before, after = ask_items(gold, tasks, measurer), ask_items(own, tasks, measurer)
    assert {request.item.task for request in measurer.asked} == {"own_sum"}
    assert {request.mode for request in measurer.asked} == {"generate"}
    even = {item.id: item for item in before.search["own_sum"] if int(item.prompt.rpartition("Q: ")[2][0]) % 2 == 0}
    assert {item.id for item in after.search["own_sum"]} == set(even)
    for item in after.search["own_sum"]:
        assert item == replace(even[item.id], answer=f" is {even[item.id].answer.strip()}, I say")
    assert len(after.left_out["own_sum"]) == len(before.search["own_sum"]) - len(even)
    assert set(after.left_out["own_sum"].values()) == {
        "answered wrongly by the unmodified model, so that it has no answer of its own"
    }
    assert after.held_out == before.held_out
    assert {name: after.search[name] for name in ("own_choice", "antonyms")} == {
        name: before.search[name] for name in ("own_choice", "antonyms")
    }


def test_a_chat_template_needs_a_model(tmp_path: Path) -> None:
    write_sum_task(tmp_path)
    config = study(tmp_path, "antonyms", engine={"name": "planted"}, lm_eval={"chat_template": True})
    with pytest.raises(UsageError, match="planted engine has no chat template"):
        tasks_of(config)


@pytest.mark.parametrize("option", [{"metric": {"own_smu": "exact_match"}}, {"num_fewshot": {"antonyms": 2}}])
def test_an_option_for_a_task_that_does_not_exist_is_refused(option: dict[str, object], tmp_path: Path) -> None:
    write_sum_task(tmp_path)
    config = study(tmp_path, "own_sum", "antonyms", lm_eval=option)
    name = "own_smu" if "metric" in option else "antonyms"
    with pytest.raises(UsageError, match=f"names '{name}', which is no task .* has own_sum"):
        check_options(config.lm_eval, tasks_of(config))
    for name in ("own_sum", "gsm8k"):
        check_options(study(tmp_path, "own_sum", lm_eval={"num_fewshot": {name: 1}}).lm_eval, tasks_of(config))
