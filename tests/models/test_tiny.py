from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cs_localize.errors import CsLocalizeError
from cs_localize.heads import ModelShape
from cs_localize.models import LocalModel, random_model, tiny
from cs_localize.models.vocabularies import byte_tokenizer
from cs_localize.tasks.tiny import TINY_COPY, TINY_MODSUM, TINY_SORT, TINY_VOCABULARY, tiny_training_text

pytestmark = pytest.mark.model

TASKS = (TINY_COPY, TINY_SORT, TINY_MODSUM)


@pytest.fixture(scope="module", params=["as made", "qwen2", "qwen3"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """The tokenizer as training uses it, and as transformers loads it beside a model of either architecture."""
    made = byte_tokenizer(TINY_VOCABULARY)
    if request.param == "as made":
        return made
    directory = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(directory)
    AutoConfig.for_model(request.param).save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def test_every_line_of_the_tiny_language_is_given_back_by_its_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tiny_training_text(np.random.default_rng(0), lines=300)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids == byte_tokenizer(TINY_VOCABULARY)(text)["input_ids"]


def test_every_word_and_every_newline_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("sort : c a = a c\n") == ["sort", " :", " c", " a", " =", " a", " c", "Ċ"]
    assert tokenizer.tokenize("sum : 7 5 = 12\n") == ["sum", " :", " 7", " 5", " =", " 12", "Ċ"]


def test_the_tokens_of_a_prompt_are_the_first_of_the_prompt_with_its_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    for task in TASKS:
        for item in map(task.item, task.questions):
            prompt = tokenizer(item.prompt)["input_ids"]
            whole = tokenizer(f"{item.prompt}{item.answer}\n")["input_ids"]
            assert whole[: len(prompt)] == prompt
            assert tokenizer.decode(whole[len(prompt) :]) == f"{item.answer}\n"


def test_another_recipe_has_another_directory(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tiny.directory("tiny-qwen2")
    assert before.parent == empty_home / "models"
    monkeypatch.setitem(tiny.RECIPES, "tiny-qwen2", replace(tiny.RECIPES["tiny-qwen2"], seed=1))
    assert tiny.directory("tiny-qwen2") != before


def test_another_language_has_another_directory(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tiny.directory("tiny-qwen2")
    monkeypatch.setattr(tiny, "tiny_training_text", lambda rng, lines: "copy : a b c = a b c\n" * lines)
    assert tiny.directory("tiny-qwen2") != before


def test_a_model_that_did_not_learn_is_an_error_and_is_not_kept(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.RECIPES, "tiny-qwen2", replace(tiny.RECIPES["tiny-qwen2"], lines=50, batch=4, steps=2))
    with pytest.raises(CsLocalizeError, match="did not learn tiny_copy, tiny_sort, tiny_modsum"):
        tiny.build("tiny-qwen2")
    assert [path.name for path in (empty_home / "models").iterdir() if not path.name.endswith(".lock")] == []


def test_training_lines_carry_labels_on_answer_and_newline_alone() -> None:
    tokenizer = byte_tokenizer(TINY_VOCABULARY)
    ids, labels = tiny._padded([("sum : 7 9 =", " 3\n"), ("copy : c =", " c\n")], tokenizer)
    assert ids.shape == labels.shape == (2, 7)
    assert tokenizer.decode(ids[0]) == "sum : 7 9 = 3\n"
    assert [tokenizer.decode(row[row >= 0]) for row in labels] == [" 3\n", " c\n"]
    assert (labels[1, 6:] < 0).all()


def test_the_head_penalty_is_the_sum_of_the_norms_of_the_heads_columns(tmp_path: Path) -> None:
    shape = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=8, ffn=16)
    path = random_model(tmp_path, "qwen3", layers=2, heads=4, kv_heads=2, head_dim=8, ffn=16)
    model = AutoModelForCausalLM.from_pretrained(path)
    weights = [layer.self_attn.o_proj.weight for layer in model.model.layers]
    expected = sum(w[:, 8 * h : 8 * h + 8].norm() for w in weights for h in range(4))
    assert torch.isclose(tiny._head_norms(model, shape), expected, rtol=1e-4)


def test_a_tiny_model_has_the_geometry_of_its_recipe(tiny_model: LocalModel) -> None:
    assert tiny_model.shape == tiny.RECIPES[tiny_model.name].shape
    config = json.loads((tiny_model.path / "config.json").read_text())
    assert config["model_type"] == tiny_model.name.removeprefix("tiny-")
    assert config["dtype"] == "float32"
    assert 2 <= tiny_model.shape.layers <= 4
    assert tiny_model.shape.kv_heads < tiny_model.shape.heads
    if tiny_model.name == "tiny-qwen3":
        assert tiny_model.shape.head_dim * tiny_model.shape.heads != config["hidden_size"]


def test_a_tiny_model_copies_sorts_and_adds_as_loaded_from_disk(tiny_model: LocalModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model.path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model.path)
    shares = tiny.accuracies(model, tokenizer)
    assert shares["tiny_copy"] >= 0.95
    assert shares["tiny_sort"] >= 0.9
    assert shares["tiny_modsum"] >= 0.9


def test_a_tiny_model_generates_an_answer_and_ends_its_line(tiny_model: LocalModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model.path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model.path)
    for task in TASKS:
        item = task.item(task.questions[0])
        prompt = tokenizer(item.prompt, return_tensors="pt")["input_ids"]
        written = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        text = tokenizer.decode(written)
        assert text.startswith(f"{item.answer}\n")
        assert task.grade(item, text)
