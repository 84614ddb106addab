from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from cs_localize.errors import UsageError
from cs_localize.measure.tokens import Encoder, WordEncoder
from cs_localize.outcomes import Item

CONTEXT = 40
WORDS = "hot -> cold\nbig -> small\nup -> down\n" * 20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small byte-level tokenizer that puts one token before every text, and a config."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=320, special_tokens=["<s>"], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "llama", "max_position_embeddings": CONTEXT, "vocab_size": 320}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def item(prompt: str, answer: str) -> Item:
    return Item("antonyms", "hot", prompt, answer)


def test_prompt_and_answer_are_the_tokens_of_the_whole_text_with_the_special_token_once(model_dir: Path) -> None:
    prompt, answer = Encoder(model_dir).encode(item("hot ->", " cold"))
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert [*prompt, *answer] == tokenizer.encode("hot -> cold").ids
    assert prompt[0] == 0
    assert 0 not in answer
    assert tokenizer.decode(list(answer)) == "Ġcold"


def test_an_answer_that_would_change_the_prompts_tokens_is_refused_by_name(model_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"antonyms/hot: the tokens of the answer 'cold' do not continue the prompt's"):
        Encoder(model_dir).encode(item("hot -> ", "cold"))


@pytest.mark.parametrize("answer", ["", " "])
def test_an_empty_answer_is_refused_by_name(model_dir: Path, answer: str) -> None:
    for encoder in (Encoder(model_dir), WordEncoder()):
        with pytest.raises(UsageError, match="antonyms/hot: the answer is empty"):
            encoder.encode(item("hot ->", answer))


def test_an_item_longer_than_the_context_is_refused_with_its_length(model_dir: Path) -> None:
    encoder = Encoder(model_dir)
    assert encoder.context == CONTEXT
    prompt, answer = encoder.encode(item("hot ->", " cold"))
    padding = "x" * (CONTEXT - len(prompt) - len(answer))
    assert sum(map(len, encoder.encode(item(f"{padding}hot ->", " cold")))) == CONTEXT
    with pytest.raises(
        UsageError, match=f"antonyms/hot takes {CONTEXT + 1} tokens and the model's context has {CONTEXT}"
    ):
        encoder.encode(item(f"x{padding}hot ->", " cold"))


def test_an_item_is_tokenized_once(model_dir: Path) -> None:
    encoder = Encoder(model_dir)
    assert encoder.encode(item("up ->", " down")) is encoder.encode(item("up ->", " down"))


def test_a_directory_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"no tokenizer can be loaded from {tmp_path}") as caught:
        Encoder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_tokenizer_is_refused_in_one_line(model_dir: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(UsageError, match=f"no tokenizer can be loaded from {tmp_path}") as caught:
        Encoder(tmp_path)
    assert "\n" not in str(caught.value)


def test_words_have_the_same_ids_in_every_process() -> None:
    prompt, answer = WordEncoder().encode(item("hot ->", " cold"))
    assert (prompt, answer) == ((3569689391, 2136806936, 1907587994), (3799178988,))


def test_two_items_of_the_same_words_are_asked_separately() -> None:
    encoder = WordEncoder()
    first = encoder.encode(Item("antonyms", "1", "hot ->", " cold"))
    second = encoder.encode(Item("antonyms", "2", "hot ->", " cold"))
    assert first[0] != second[0]
    assert first[0][1:] == second[0][1:]
    assert first[1] == second[1]
