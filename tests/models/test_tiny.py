from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cs_localize.errors import CsLocalizeError
from cs_localize.heads import ModelShape
from cs_localize.models import LocalModel, tiny
from cs_localize.models.vocabularies import word_tokenizer
from cs_localize.tasks.tiny import TINY_COPY, TINY_MODSUM, TINY_SORT, TINY_VOCABULARY, tiny_training_text

pytestmark = pytest.mark.model

TASKS = (TINY_COPY, TINY_SORT, TINY_MODSUM)


def test_every_line_of_the_tiny_language_is_tokenized_word_by_word_and_given_back() -> None:
    tokenizer = word_tokenizer(TINY_VOCABULARY)
    text = tiny_training_text(np.random.default_rng(0), lines=300)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert len(ids) == sum(len(line.split()) + 1 for line in text.splitlines())


def test_the_tokens_of_a_prompt_are_the_first_of_the_prompt_with_its_answer() -> None:
    tokenizer = word_tokenizer(TINY_VOCABULARY)
    for task in TASKS:
        for item in map(task.item, task.questions):
            prompt = tokenizer(item.prompt)["input_ids"]
            assert tokenizer(item.prompt + item.answer)["input_ids"][: len(prompt)] == prompt
            assert tokenizer.decode(tokenizer(f"{item.prompt}{item.answer}\n")["input_ids"][len(prompt) :]) == (
                f"{item.answer}\n"
            )


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
    tokenizer = word_tokenizer(TINY_VOCABULARY)
    ids, labels = tiny._padded([("sum : 7 9 =", " 3\n"), ("sort : c a =", " a c\n")], tokenizer)
    assert ids.shape == labels.shape == (2, 8)
    assert tokenizer.decode(labels[0][labels[0] >= 0]) == " 3\n"
    assert tokenizer.decode(labels[1][labels[1] >= 0]) == " a c\n"
    assert tokenizer.decode(ids[0][:7]) == "sum : 7 9 = 3\n"


def test_the_head_penalty_is_the_sum_of_the_norms_of_the_heads_columns(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from cs_localize.models import random_model

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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model.path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model.path)
    shares = tiny.accuracies(model, tokenizer)
    assert shares["tiny_copy"] >= 0.95
    assert shares["tiny_sort"] >= 0.9
    assert shares["tiny_modsum"] >= 0.9


def test_a_tiny_model_generates_an_answer_and_ends_its_line(tiny_model: LocalModel) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model.path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model.path)
    for task in TASKS:
        item = task.item(task.questions[0])
        prompt = tokenizer(item.prompt, return_tensors="pt")["input_ids"]
        written = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        text = tokenizer.decode(written)
        assert text.startswith(f"{item.answer}\n")
        assert task.grade(item, text)
