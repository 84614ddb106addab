"""What the bridge finds by name, and what it refuses in one line before any of the task's code runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cs_localize.errors import UsageError
from cs_localize.tasks import get_task
from cs_localize.tasks.harness import library
from tests.tasks.harness.builders import own_task, write_choice_task, write_sum_task, write_task, write_word_task


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def refusal(name: str, folder: Path | None = None, **options: object) -> str:
    with pytest.raises(UsageError) as error:
        own_task(folder, name, **options) if folder else get_task(name)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_misspelt_task_of_lm_eval_is_answered_with_the_nearest_name() -> None:
    message = refusal("hellaswagg")
    assert "no task 'hellaswagg'; did you mean 'hellaswag'?" in message
    assert "antonyms" in message


def test_a_task_of_the_users_own_folder_is_found_and_hinted_at(tmp_path: Path) -> None:
    write_word_task(tmp_path)
    assert own_task(tmp_path, "own_word").name == "own_word"
    assert "did you mean 'own_word'?" in refusal("own_wrod", tmp_path)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    for name in ("hellaswag", "own_word"):
        assert f"there is no folder {tmp_path / 'none'}" in refusal(name, tmp_path / "none")


@pytest.mark.parametrize("name", ["hellaswag", "own_word"])
def test_a_folder_without_a_yaml_file_is_named_whatever_is_asked(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    assert refusal(name, folder) == f"lm_eval.include_path: the folder {folder} is empty"
    (folder / "own_word.yml").write_text("task: own_word\n", encoding="utf-8")
    assert refusal(name, folder) == f"lm_eval.include_path: the folder {folder} holds no file that ends in .yaml"
    (folder / "file.yaml").touch()
    assert refusal(name, folder / "file.yaml") == f"lm_eval.include_path: {folder / 'file.yaml'} is no folder"


def test_a_yaml_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_word_task(tmp_path)
    (tmp_path / "gone.yaml").symlink_to("nowhere")
    assert refusal("own_word", tmp_path) == f"cannot read {tmp_path / 'gone.yaml'}: No such file or directory"


def test_groups_and_tags_are_the_tasks_in_them_wherever_they_lie(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    write_word_task(tmp_path, "own_one", tag="own_tag")
    write_word_task(tmp_path / "far", "own_two", tag="own_tag")
    group = {"group": "own_group", "task": ["own_one", {"task": "own_two", "num_fewshot": 1}]}
    (tmp_path / "group.yaml").write_text(yaml.safe_dump(group))
    for name in ("own_tag", "own_group"):
        task = own_task(tmp_path, name)
        assert "2 tasks" in task.description
        ids = {item.id.partition("/")[0] for item in task.split(0).search}
        assert ids == {"own_one", "own_two"}


def test_groups_of_lm_eval_are_resolved_from_a_few_of_its_folders() -> None:
    for name, size in (("mmlu", 57), ("arithmetic", 10), ("super-glue-lm-eval-v1", 8)):
        _, leaves = library._find(name, None)
        assert len(leaves) == size


@pytest.mark.parametrize("name", ["humaneval", "humaneval_instruct", "mbpp", "humaneval_infilling", "humaneval_64"])
def test_tasks_that_run_model_written_code_are_refused_and_their_code_is_never_imported(name: str) -> None:
    before = set(sys.modules)
    message = refusal(name)
    assert "executing code that the model writes" in message or name == "humaneval_64"
    assert ("--allow-code-execution" in message) == (name in ("humaneval", "humaneval_instruct", "mbpp"))
    assert not [module for module in set(sys.modules) - before if "humaneval" in module or "mbpp" in module]


@pytest.mark.parametrize("flag", [True, False])
def test_a_task_of_ones_own_that_runs_code_is_refused_by_its_flag_and_by_its_source(flag: bool, tmp_path: Path) -> None:
    proof = tmp_path / "imported"
    (tmp_path / "utils.py").write_text(f"open({str(proof)!r}, 'w')\n# evaluate.load('code_eval')\ndef f(doc): ...\n")
    write_sum_task(tmp_path, unsafe_code=flag)
    text = (tmp_path / "own_sum.yaml").read_text()
    (tmp_path / "own_sum.yaml").write_text(text if flag else text + "process_results: !function utils.f\n")
    assert "executing code that the model writes, in a way that" in refusal("own_sum", tmp_path)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"output_type": "loglikelihood_rolling"}, "of kind 'loglikelihood_rolling'"),
        ({"repeats": 4}, "asks every question several times"),
        ({"generation_kwargs": {"do_sample": True, "temperature": 0.7, "until": ["\n"]}}, "at random"),
        ({"doc_to_image": "picture"}, "images or sounds"),
        ({"num_fewshot": 100, "fewshot_config": {"sampler": "default"}}, "cannot show 100 examples"),
        ({"metric_list": [{"metric": "bleu"}]}, "no metric that says right or wrong"),
        ({"metric_list": []}, "no metric that says right or wrong"),
        ({"metric_list": "exact_match"}, "'metric' key not provided"),
        ({"metric_list": ["exact_match"]}, "'metric' key not provided"),
        ({"num_fewshot": -1}, "cannot show -1 examples"),
        ({"repeats": "two"}, "asks every question several times"),
        ({"generation_kwargs": ["until"]}, "its generation_kwargs are no 'option: value' lines"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(config: dict[str, object], message: str, tmp_path: Path) -> None:
    write_sum_task(tmp_path, **config)
    assert message in refusal("own_sum", tmp_path)


def test_without_metrics_of_its_own_a_task_has_those_of_its_kind(tmp_path: Path) -> None:
    write_sum_task(tmp_path, metric_list=None)
    assert own_task(tmp_path, "own_sum").metric == "exact_match,first"


@pytest.mark.parametrize(
    "config", [{"gen_prefix": 5}, {"target_delimiter": None}, {"generation_kwargs": {"max_gen_toks": "x"}}]
)
def test_questions_that_their_author_cannot_put_are_one_line(config: dict[str, object], tmp_path: Path) -> None:
    write_sum_task(tmp_path, **config)
    with pytest.raises(UsageError, match=r"^task 'own_sum': document \d+ cannot be put as a question: [^\n]+$"):
        own_task(tmp_path, "own_sum").split(0, 1, 1)


def test_a_python_class_of_lm_eval_is_refused() -> None:
    assert "is a Python class" in refusal("squadv2")


def test_data_that_cannot_be_had_offline_are_named_in_one_line() -> None:
    message = refusal("boolq")
    assert "aps/super_glue" in message
    assert "without a network the data must be in the Hugging Face cache" in message


def test_data_files_that_are_gone_are_one_line(tmp_path: Path) -> None:
    write_word_task(tmp_path)
    (tmp_path / "own_word.jsonl").unlink()
    assert "cannot be had: FileNotFoundError" in refusal("own_word", tmp_path)


def test_an_empty_split_is_one_line(tmp_path: Path) -> None:
    write_task(tmp_path, "own_empty", [{"text": "a"}], output_type="loglikelihood", doc_to_text="{{text}}")
    (tmp_path / "utils.py").write_text("def nothing(docs):\n    return docs.select([])\n")
    text = (tmp_path / "own_empty.yaml").read_text()
    (tmp_path / "own_empty.yaml").write_text(text + "doc_to_target: text\nprocess_docs: !function utils.nothing\n")
    assert "its evaluation split is empty" in refusal("own_empty", tmp_path)


def test_the_metric_is_the_papers_or_the_first_of_right_and_wrong_or_the_one_asked_for(tmp_path: Path) -> None:
    write_choice_task(tmp_path)
    write_choice_task(tmp_path, "hellaswag")
    write_word_task(tmp_path)
    write_sum_task(tmp_path)
    assert own_task(tmp_path, "own_choice").metric == "acc,none"
    assert own_task(tmp_path, "hellaswag").metric == "acc_norm,none", "from the table; perplexity is passed over below"
    assert own_task(tmp_path, "own_word").metric == "acc,none"
    assert own_task(tmp_path, "own_sum").metric == "exact_match,first"
    assert own_task(tmp_path, "own_sum", metric={"own_sum": "exact_match,last"}).metric == "exact_match,last"
    assert own_task(tmp_path, "own_choice", metric={"own_choice": "acc_norm"}).metric == "acc_norm,none"


def test_an_unknown_metric_is_answered_with_what_the_task_offers(tmp_path: Path) -> None:
    write_choice_task(tmp_path)
    message = refusal("own_choice", tmp_path, metric={"own_choice": "acc_nrm"})
    assert "no metric 'acc_nrm'; did you mean 'acc_norm,none'?" in message
    assert "acc,none or acc_norm,none" in message


def test_without_lm_eval_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_word_task(tmp_path)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'cs_localize[eval]'" in refusal("hellaswag")
    assert "pip install 'cs_localize[eval]'" in refusal("own_word", tmp_path)


def test_the_room_of_tasks_imports_without_lm_eval_datasets_torch_and_transformers() -> None:
    code = f"""
import builtins
real = builtins.__import__
def guarded(name, *args, **options):
    if name.partition(".")[0] in {{"lm_eval", "datasets", "torch", "transformers", "ray", "vllm"}}:
        raise ModuleNotFoundError(name)
    return real(name, *args, **options)
builtins.__import__ = guarded
import {library.__name__}, cs_localize.tasks
assert cs_localize.tasks.get_task("antonyms").split(0).search
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("content", [b"task: own_sum\n  : [x", b"task: own_sum\ndoc_to_text: \xff\xfe\n"])
def test_a_file_that_is_not_yaml_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    assert f"{tmp_path / 'mine.yaml'} is not valid YAML" in refusal("own_sum", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "its evaluation split is empty"), ('{"sum": "1 + 1", "answer": "2"}\n{"sum": \n', "JSON parse error")],
)
def test_data_that_are_empty_or_broken_are_told_apart(content: str, message: str, tmp_path: Path) -> None:
    write_sum_task(tmp_path)
    (tmp_path / "own_sum.jsonl").write_text(content)
    assert message in refusal("own_sum", tmp_path)
