from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cs_localize.config import DataConfig
from cs_localize.errors import UsageError
from cs_localize.outcomes import Outcome
from cs_localize.tasks import Task, content_hash, find_tasks, get_task

ROWS = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(6)]


def lines(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path, name: str = "mine", **options: object) -> Task:
    return find_tasks([name], {name: DataConfig.model_validate({"file": str(path), **options})})[name]


def test_a_line_is_a_question_and_its_prompt_is_its_id_and_family(tmp_path: Path) -> None:
    task = read(lines(tmp_path / "my.jsonl", ROWS))

    assert [(q.id, q.text, q.answer, q.family) for q in task.questions] == [
        (row["prompt"], row["prompt"], row["answer"], row["prompt"]) for row in ROWS
    ]
    item = task.item(task.questions[0])
    assert (item.prompt, item.answer) == ("0 + 1 =", " 1")
    assert task.grade(item, " 1\n1 + 1 = 2")
    assert len(task.split(0).search) == 3


def test_template_shots_relatives_ids_and_families_are_the_users(tmp_path: Path) -> None:
    rows = [{**row, "id": f"q{n}", "family": str(n // 2)} for n, row in enumerate(ROWS)]
    task = read(lines(tmp_path / "my.jsonl", rows), template="Sum: {text}", shots=2, relatives=["addition", "antonyms"])

    assert task.prefix == "Sum: 0 + 1 = 1\nSum: 1 + 1 = 2\n"
    assert [question.id for question in task.questions] == ["q2", "q3", "q4", "q5"]
    assert task.related(get_task("addition"))
    sides = task.split(0, 2, 2)
    assert {item.id for item in sides.search} in ({"q2", "q3"}, {"q4", "q5"})


def test_empty_lines_a_byte_order_mark_windows_line_ends_and_any_script_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "my.jsonl"
    path.write_bytes('\ufeff{"prompt": "Österreich:", "answer": "Wien"}\r\n\r\n  \n'.encode())
    path.write_bytes(path.read_bytes() + '{"prompt": "日本:", "answer": "東京"}'.encode())

    assert [(q.text, q.answer) for q in read(path).questions] == [("Österreich:", "Wien"), ("日本:", "東京")]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"prompt": "a"', "not valid JSON"),
        (b"just words", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'["a", "b"]', "expected fields"),
        (b'{"prompt": "a"}', "'answer' is missing"),
        (b'{"answer": "a"}', "'prompt' is missing"),
        (b'{"prompt": "a", "answer": ""}', "'answer' is empty"),
        (b'{"prompt": " ", "answer": "b"}', "'prompt' is empty"),
        (b'{"prompt": "a", "answer": 4}', "'answer' must be text"),
        (b'{"prompt": "a", "answer": null}', "'answer' must be text"),
        (b'{"prompt": "a", "answer": " b"}', "'answer' must be one line"),
        (b'{"prompt": "a", "answer": "b\\nc"}', "'answer' must be one line"),
        (b'{"prompt": "a ", "answer": "b"}', "'prompt' ends in white space"),
        (b'{"prompt": "a", "answer": "b", "anwser": "c"}', "unknown field 'anwser'"),
        (b'{"prompt": "first", "answer": "b"}', "'first' is asked already, .*line 1; leave one out"),
        (b'{"prompt": "a", "answer": "b", "id": "first"}', "'first' is asked already, .*line 1"),
        (b'{"prompt": "caf\xe9", "answer": "b"}', "not UTF-8 at byte 16"),
        (b'{"prompt": "\\ud800", "answer": "b"}', "surrogate"),
        (b'{"prompt": "a", "answer": "b", "choices": "bc"}', "'choices' must be a list"),
        (b'{"prompt": "a", "answer": "b", "choices": null}', "'choices' must be a list"),
        (b'{"prompt": "a", "answer": "b", "choices": ["b"]}', "at least two"),
        (b'{"prompt": "a", "answer": "b", "choices": ["b", 2]}', "'choice' must be text"),
        (b'{"prompt": "a", "answer": "b", "choices": ["b", ""]}', "'choice' is empty"),
        (b'{"prompt": "a", "answer": "b", "choices": ["b", "c "]}', "a choice must be one line"),
        (b'{"prompt": "a", "answer": "b", "choices": ["b", "c", "c"]}', "the choice 'c' is there twice"),
        (b'{"prompt": "a", "answer": "b", "choices": ["c", "d"]}', "the answer 'b' is not among the choices"),
        (b'{"prompt": "a", "answer": "b", "choices": ["b", "c"]}', "'choices', or none; the first is .*line 1"),
    ],
)
def test_a_mistake_in_a_line_is_named_with_its_number(tmp_path: Path, bad: bytes, message: str) -> None:
    path = tmp_path / "my.jsonl"
    path.write_bytes(b'{"prompt": "first", "answer": "b"}\n\n' + bad + b"\n")

    with pytest.raises(UsageError, match=message) as error:
        read(path)

    assert str(error.value).startswith(f"{path}, line 3: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_a_file_without_a_question_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "my.jsonl"
    path.write_bytes(content)

    with pytest.raises(UsageError, match="holds no question"):
        read(path)


def test_a_missing_file_a_folder_and_too_many_shots_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*No such file"):
        read(tmp_path / "no.jsonl")
    with pytest.raises(UsageError, match=r"cannot read .*directory"):
        read(tmp_path)
    with pytest.raises(UsageError, match=r"6 shots leave none of 6 questions"):
        read(lines(tmp_path / "my.jsonl", ROWS), shots=6)


def test_a_name_that_is_taken_and_a_relative_that_is_not_there_are_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "my.jsonl", ROWS)

    with pytest.raises(UsageError, match=r"data.plurals: there is a task of that name"):
        read(path, "plurals")
    with pytest.raises(UsageError, match=r"data.mine: no task 'plural' to be a relative"):
        read(path, relatives=["plural"])


def test_registered_tasks_are_found_beside_own_ones_and_an_own_one_not_asked_for_is_not_read(tmp_path: Path) -> None:
    data = {name: DataConfig(file=str(tmp_path / f"{name}.jsonl")) for name in ("mine", "other")}
    lines(tmp_path / "mine.jsonl", ROWS)

    found = find_tasks(["plurals", "mine"], data)

    assert list(found) == ["plurals", "mine"]
    assert found["plurals"] is get_task("plurals")


SOURCE = """
from cs_localize.tasks import questions

@questions
def squares():
    for n in range(5):
        yield {"prompt": f"{n} squared is", "answer": str(n * n)}

@questions
def broken():
    return [{"prompt": "a", "answer": "b"}, {"prompt": "c"}]

@questions
def failing():
    raise ValueError("no network\\nhere")

def unmarked():
    return []
"""


def test_a_marked_function_of_a_python_file_is_a_task(tmp_path: Path) -> None:
    path = tmp_path / "my_tasks.py"
    path.write_text(SOURCE, encoding="utf-8")

    task = read(path, "squares", shots=1)

    assert task.prefix == "0 squared is 0\n"
    assert [question.answer for question in task.questions] == ["1", "4", "9", "16"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "question 2 of broken: 'answer' is missing"),
        ("failing", "ValueError: no network here"),
        ("unmarked", "no function 'unmarked' marked with @questions; there is squares, broken, failing"),
        ("absent", "no function 'absent'"),
    ],
)
def test_a_mistake_in_a_python_file_is_one_line(tmp_path: Path, name: str, message: str) -> None:
    path = tmp_path / "my_tasks.py"
    path.write_text(SOURCE, encoding="utf-8")

    with pytest.raises(UsageError, match=message) as error:
        read(path, name)

    assert "\n" not in str(error.value)


def test_a_python_file_that_does_not_parse_or_is_not_there_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "my_tasks.py"
    path.write_text("def squares(:\n", encoding="utf-8")

    with pytest.raises(UsageError, match="SyntaxError"):
        read(path, "squares")
    with pytest.raises(UsageError, match="no such file"):
        read(tmp_path / "no.py", "squares")


def test_a_question_with_choices_is_scored_by_its_margin_and_never_generated(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{n} comes after", "answer": f"{n - 1}", "choices": [f"{n - 1}1", f"{n - 1}"]} for n in range(4)
    ]
    task = read(lines(tmp_path / "my.jsonl", rows), shots=1)
    item = task.item(task.questions[0])

    assert (item.prompt, item.answer) == ("0 comes after -1\n1 comes after", " 0")
    assert item.choices == ((item.prompt, " 01"), (item.prompt, " 0"))
    assert (item.gold, item.max_tokens) == ((1,), 0)
    assert task.score == "log-probability margin of the right choice"
    parts = [Outcome(-3.0, False, "", 9), Outcome(-1.0, True, "", 8)]
    outcome = task.outcome(item, parts)
    assert (outcome.score, outcome.correct, outcome.tokens) == (2.0, True, 17)
    assert not task.outcome(item, [replace(part, score=-1.0) for part in parts]).correct, "of two equals none is right"
    record = task.record(item, outcome)
    assert record.responses == [(-3.0, False), (-1.0, True)]
    assert (record.target, record.metrics) == (1, {"acc": 1.0})


def test_choices_are_in_the_hash_and_leave_that_of_tasks_without_them_alone(tmp_path: Path) -> None:
    rows = [{**row, "choices": [row["answer"], "no"]} for row in ROWS]

    others = [*rows[:-1], {**rows[-1], "choices": [rows[-1]["answer"], "none"]}]
    hashes = [content_hash(read(lines(tmp_path / "a.jsonl", given))) for given in (ROWS, rows, others)]

    assert len(set(hashes)) == 3
    assert hashes[0] == "147f9016829d3eac96432a3242f72c29a3896c168b270b032ae4ad2662e3979c"


def test_the_hash_is_of_all_that_is_asked_and_of_nothing_else(tmp_path: Path) -> None:
    first = content_hash(read(lines(tmp_path / "a.jsonl", ROWS)))

    assert content_hash(read(lines(tmp_path / "b.jsonl", ROWS), "other")) == first
    changed = [*ROWS[:-1], {**ROWS[-1], "answer": "7"}]
    assert content_hash(read(lines(tmp_path / "a.jsonl", changed))) != first
    assert content_hash(read(lines(tmp_path / "a.jsonl", ROWS), shots=1)) != first
    assert content_hash(read(lines(tmp_path / "a.jsonl", ROWS), template="Q: {text}")) != first
