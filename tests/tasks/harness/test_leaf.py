"""Items, few-shot examples and grades of lm-eval's tasks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from cs_localize.errors import UsageError
from cs_localize.outcomes import Outcome
from tests.tasks.harness.builders import (
    SHARED,
    own_task,
    write_blank_task,
    write_choice_task,
    write_gsm8k,
    write_sum_task,
    write_task,
    write_word_task,
)

TEXTS = (" {}", " {}\nand 70", " it is 70, no: {}", "", " -{}", " five", " {}.", " é {} ünd 80", "{}{}", " {},")


def generated(text: str) -> list[Outcome]:
    return [Outcome(math.nan, False, text, 9)]


def written(number: int) -> str:
    """What a model writes, the sum or not, to a document of ``write_sum_task``."""
    return TEXTS[number % len(TEXTS)].replace("{}", str(number // 6 + number % 6 + 2))


def lm_evals_grades(folder: Path, name: str, wrote: Callable[[int], str] = written) -> dict[str, dict[int, float]]:
    """What lm-eval makes of such a model: by filter, the grade of every document."""
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Parrot(LM):
        def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
            return [wrote(int(request.doc_id or 0)) for request in requests]

        def loglikelihood(self, requests: list[Instance]) -> None: ...

        def loglikelihood_rolling(self, requests: list[Instance]) -> None: ...

    results = lm_eval.simple_evaluate(
        model=Parrot(),
        tasks=[name],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    grades: dict[str, dict[int, float]] = {}
    for sample in results["samples"][name]:
        grades.setdefault(sample["filter"], {})[int(sample["doc_id"])] = sample["exact_match"]
    return grades


def test_generated_text_is_graded_as_lm_eval_grades_the_same_text(tmp_path: Path) -> None:
    write_sum_task(tmp_path)
    theirs = lm_evals_grades(tmp_path, "own_sum")
    for wanted in ("first", "last"):
        task = own_task(tmp_path, "own_sum", metric={"own_sum": f"exact_match,{wanted}"})
        split = task.split(0)
        grades = {
            int(item.id): task.outcome(item, generated(written(int(item.id)))).correct
            for item in (*split.search, *split.held_out)
        }
        assert len(grades) == 36 - 3
        assert set(grades.values()) == {False, True}
        assert grades == {number: bool(theirs[wanted][number]) for number in grades}


def test_examples_are_the_same_for_every_question_and_on_neither_side(tmp_path: Path) -> None:
    for sampler in ("default", "first_n"):
        write_sum_task(tmp_path, fewshot_config={"sampler": sampler}, fewshot_split="test")
        split = own_task(tmp_path, "own_sum").split(0)
        items = (*split.search, *split.held_out)
        shown = {item.prompt.rpartition("Q: ")[0] for item in items}
        asked = [item.prompt.rpartition("Q: ")[2] for item in items]
        assert len(shown) == 1
        (prefix,) = shown
        assert prefix.count("Q: ") == 3
        assert not [question for question in asked if f"Q: {question}" in prefix]
        assert len(items) == 36 - 3


def test_examples_that_the_task_lists_are_shown_and_a_question_like_one_of_them_is_not_asked(tmp_path: Path) -> None:
    shots = [{"sum": "1 + 1", "answer": "two"}, {"sum": "9 + 9", "answer": "eighteen"}]
    write_sum_task(tmp_path, num_fewshot=2, fewshot_config={"sampler": "first_n", "samples": shots})
    split = own_task(tmp_path, "own_sum").split(0)
    items = (*split.search, *split.held_out)
    assert {item.prompt.rpartition("Q: ")[0] for item in items} == {"Q: 1 + 1\nA: two\n\nQ: 9 + 9\nA: eighteen\n\n"}
    assert {item.id for item in items} == {str(number) for number in range(1, 36)}


def test_the_number_of_examples_can_be_chosen(tmp_path: Path) -> None:
    write_sum_task(tmp_path)
    for count in (0, 5):
        item = own_task(tmp_path, "own_sum", num_fewshot={"own_sum": count}).split(0).search[0]
        assert item.prompt.count("Q: ") == count + 1


def test_questions_that_read_alike_are_on_one_side(tmp_path: Path) -> None:
    docs = [{"question": f"{number % 12}?", "answer": "yes"} for number in range(48)]
    write_task(tmp_path, "own_twice", docs, doc_to_text="{{question}}", doc_to_target="answer")
    split = own_task(tmp_path, "own_twice").split(3)
    sides = [{item.prompt for item in side} for side in (split.search, split.held_out)]
    assert not sides[0] & sides[1]
    assert {len(split.search), len(split.held_out)} == {24}


def test_items_depend_on_the_seed_alone_and_a_smaller_search_is_a_prefix(tmp_path: Path) -> None:
    write_choice_task(tmp_path)
    task = own_task(tmp_path, "own_choice")
    first, again = task.split(1, 8, 8), own_task(tmp_path, "own_choice").split(1, 8, 8)
    assert first == again
    assert task.split(1, 4, 8).search == first.search[:4]
    assert task.split(2, 8, 8).search != first.search
    assert not {item.id for item in first.search} & {item.id for item in first.held_out}
    with pytest.raises(UsageError, match="too few for 20 search and 20 held-out items"):
        task.split(1, 20, 20)


def test_a_choice_item_holds_every_choice_and_the_right_one(tmp_path: Path) -> None:
    write_choice_task(tmp_path)
    item = own_task(tmp_path, "own_choice").split(0, 1, 1).search[0]
    assert [answer for _, answer in item.choices][item.gold[0]] == item.answer
    assert all(prompt == item.prompt for prompt, _ in item.choices)
    assert item.max_tokens == 0


def test_a_choice_in_the_prompt_is_scored_by_what_follows_it(tmp_path: Path) -> None:
    write_blank_task(tmp_path)
    item = own_task(tmp_path, "own_blank").split(0, 1, 1).search[0]
    assert len({prompt for prompt, _ in item.choices}) == 2
    assert {answer for _, answer in item.choices} == {" was afraid."}
    assert item.prompt == item.choices[item.gold[0]][0]


@pytest.mark.parametrize(
    ("label", "choices", "reason"),
    [
        (7, ["a", "b"], "an answer that is not among the choices"),
        (0, ["a"], "a question without a wrong choice"),
    ],
)
def test_what_has_no_right_or_no_wrong_choice_is_left_out_with_the_reason(
    label: int, choices: list[str], reason: str, tmp_path: Path
) -> None:
    good = [{"question": f"{number}?", "choices": ["a", "b"], "label": 0} for number in range(5)]
    bad = {"question": "bad?", "choices": choices, "label": label}
    config = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "choices"}
    write_task(tmp_path, "own_bad", [*good, bad], doc_to_target="label", **config)
    split = own_task(tmp_path, "own_bad").split(0)
    assert dict(split.left_out) == {"5": reason}
    assert len(split.search) + len(split.held_out) == 5


def test_a_metric_of_degrees_is_refused_when_it_grades(tmp_path: Path) -> None:
    write_word_task(tmp_path)
    (tmp_path / "utils.py").write_text("def half(doc, results):\n    return {'share': 0.5 if results[0][1] else 0}\n")
    text = (tmp_path / "own_word.yaml").read_text()
    text += "process_results: !function utils.half\n"
    text = text[: text.index("metric_list:")] + text[text.index("output_type:") :]
    (tmp_path / "own_word.yaml").write_text(
        text + "metric_list: [{metric: share, aggregation: mean, higher_is_better: true}]\n"
    )
    task = own_task(tmp_path, "own_word")
    item = task.split(0, 1, 1).search[0]
    assert not task.outcome(item, [Outcome(-1.0, False, "", 3)]).correct
    with pytest.raises(UsageError, match=r"metric 'share,none' 0\.5, which is neither right"):
        task.outcome(item, [Outcome(-1.0, True, "", 3)])


def test_tasks_of_one_source_are_relatives(tmp_path: Path) -> None:
    write_choice_task(tmp_path)
    write_word_task(tmp_path)
    (tmp_path / "again.yaml").write_text(
        (tmp_path / "own_word.yaml").read_text().replace("task: own_word", "task: again")
    )
    word, again, choice = (own_task(tmp_path, name) for name in ("own_word", "again", "own_choice"))
    assert word.related(again)
    assert not word.related(choice)


def test_a_chat_template_makes_one_conversation_of_prompt_and_examples(tmp_path: Path) -> None:
    from cs_localize.config import LmEvalConfig
    from cs_localize.tasks import get_task

    def chat(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        turns = "".join(f"[{message['role']}]{message['content']}" for message in messages)
        return turns + ("[assistant]" if add_generation_prompt else "")

    write_sum_task(tmp_path)
    options = {"include_path": str(tmp_path), "system_instruction": "Be brief.", "num_fewshot": {"own_sum": 1}}
    for multiturn in (False, True):
        task = get_task(
            "own_sum",
            LmEvalConfig.model_validate({**options, "chat_template": True, "fewshot_as_multiturn": multiturn}),
            chat,
        )
        item = task.split(0, 1, 1).search[0]
        assert item.prompt.startswith("[system]Be brief.[user]Q: 1 + 1\nA:")
        assert item.prompt.endswith("[assistant]")
        assert item.prompt.count("[user]") == 1 + multiturn
        assert item.answer == item.answer.strip(), "after a template nothing stands between prompt and answer"


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared")
def test_gsm8k_is_asked_and_graded_as_lm_eval_grades_the_same_answers(tmp_path: Path) -> None:
    docs = write_gsm8k(tmp_path)

    def wrote(number: int) -> str:
        gold = docs[number]["answer"].rpartition("#### ")[2]
        return (f" so it is {gold}", f" #### {gold}.", " #### none", f"{gold}1", docs[number]["answer"], "")[number % 6]

    theirs = lm_evals_grades(tmp_path, "gsm8k", wrote)
    for wanted in ("flexible-extract", "strict-match"):
        task = own_task(tmp_path, "gsm8k", metric={"gsm8k": f"exact_match,{wanted}"})
        split = task.split(0)
        items = (*split.search, *split.held_out)
        assert len(items) == 120 - 5
        assert {item.prompt.count("Question:") for item in items} == {6}
        grades = {int(item.id): task.outcome(item, generated(wrote(int(item.id)))).correct for item in items}
        assert set(grades.values()) == {False, True}
        assert grades == {number: bool(theirs[wanted][number]) for number in grades}
    assert own_task(tmp_path, "gsm8k").metric == "exact_match,flexible-extract"
