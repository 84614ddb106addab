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
from cs_localize.measure.tokens import Encoder, ItemError, WordEncoder
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


@pytest.fixture(scope="module")
def real() -> Path:
    from cs_localize.models import resolve

    return resolve("smollm2-135m-instruct").path


PAIRS = [
    ("hot ->", " cold"),
    ("hot -> ", "cold"),
    ("hot -> ", " cold"),
    ("The capital of Türkiye is", " Ankara, 東京 or São Paulo"),
    ("un", "believable"),
    ("line\n\n", "next"),
    ("<|im_start|>user\nhot?<|im_end|>\n<|im_start|>assistant\n", "cold"),
]


@pytest.mark.model
@pytest.mark.parametrize(("context", "continuation"), PAIRS)
def test_items_of_lm_eval_are_cut_into_tokens_as_it_cuts_them(context: str, continuation: str, real: Path) -> None:
    from lm_eval.api.model import TemplateLM
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real)

    class Cutter:
        backend = "causal"

        def tok_encode(self, text: str) -> list[int]:
            return list(tokenizer.encode(text))

    theirs = TemplateLM._encode_pair(Cutter(), context, continuation)
    asked = Item("own", "1", context, continuation, boundary="lm-eval", choices=((context, continuation),))
    encoder = Encoder(real)
    assert encoder.encode(asked) == tuple(map(tuple, theirs))
    assert encoder.choices(asked) == (encoder.encode(asked),)
    assert encoder.prompt(asked) == tuple(tokenizer.encode(context))


def test_a_prompt_that_begins_with_the_first_token_itself_gets_no_other(model_dir: Path) -> None:
    encoder = Encoder(model_dir)
    plain, templated = encoder.encode(item("hot ->", " cold")), encoder.encode(item("<s>hot ->", " cold"))
    assert plain == templated


def test_what_an_item_lacks_is_an_error_with_its_reason(model_dir: Path) -> None:
    encoder = Encoder(model_dir)
    for broken, reason in (
        (Item("own", "1", "hot ->", "", boundary="lm-eval"), "an answer without tokens"),
        (item("hot ->", ""), "an answer without tokens"),
        (item("hot " * 30, " cold"), f"longer than the model's context of {CONTEXT} tokens"),
        (Item("own", "1", "hot ->", " a", choices=(("hot ->", ""),), boundary="lm-eval"), "an answer without tokens"),
    ):
        with pytest.raises(ItemError) as error:
            encoder.encode(broken)
        assert error.value.reason == reason


def test_a_model_without_a_chat_template_says_so(model_dir: Path) -> None:
    with pytest.raises(UsageError, match="chat template cannot be applied"):
        Encoder(model_dir).chat([{"role": "user", "content": "hot?"}])


@pytest.mark.model
def test_a_conversation_is_written_by_the_models_own_template(real: Path) -> None:
    encoder = Encoder(real)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hot?"}]
    assert encoder.chat(messages).endswith("<|im_start|>user\nhot?<|im_end|>\n<|im_start|>assistant\n")
    begun = [*messages, {"role": "assistant", "content": "It is"}]
    assert encoder.chat(begun, add_generation_prompt=False).endswith("assistant\nIt is")


def test_the_planted_engine_has_no_choices() -> None:
    asked = item("hot ->", " cold")
    assert WordEncoder().prompt(asked) == WordEncoder().encode(asked)[0]
    with pytest.raises(UsageError, match="multiple-choice, which the planted engine cannot answer"):
        WordEncoder().choices(Item("own", "1", "a", " b", choices=(("a", " b"),)))
