"""Items as token ids: what is sent to the model, decided once and on the driver."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

from cs_localize.errors import UsageError, one_line
from cs_localize.outcomes import Item

TokenIds = tuple[int, ...]


class ItemEncoder(Protocol):
    """Turns an item into token ids.

    Attributes:
        context: most tokens the model can read and write; None if there is no limit.
    """

    context: int | None

    def encode(self, item: Item) -> tuple[TokenIds, TokenIds]:
        """Tokens of the prompt and of the answer that continues it.

        Raises:
            UsageError: if the answer is empty or its tokens do not continue the prompt's.
        """
        ...


class Encoder:
    """The model's own tokenizer.

    Prompt and answer are tokenized together, as the model would meet them, and split where the prompt's own tokens end.
    Special tokens are those the tokenizer adds to plain text by default (for Llama models the one that begins a text,
    for Qwen models none); no chat template is applied.

    Args:
        model_dir: local directory with the tokenizer's files and ``config.json``.
        trust_remote_code: let the model's directory run its own Python code.

    Raises:
        UsageError: if the directory has no tokenizer that can be loaded.
    """

    def __init__(self, model_dir: Path, trust_remote_code: bool = False) -> None:
        from transformers import AutoConfig, AutoTokenizer

        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(model_dir), **options)
            config = AutoConfig.from_pretrained(str(model_dir), **options).get_text_config()
        except Exception as error:  # the tokenizers package raises no narrower kind on a damaged file
            raise UsageError(f"no tokenizer can be loaded from {model_dir}: {one_line(error, 200)}") from None
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self._cache: dict[Item, tuple[TokenIds, TokenIds]] = {}

    def encode(self, item: Item) -> tuple[TokenIds, TokenIds]:
        """Tokens of the prompt and of the answer that continues it.

        Raises:
            UsageError: naming the item, if its answer is empty, does not continue the prompt's tokens, or is longer
                together with the prompt than the model's context.
        """
        if item not in self._cache:
            self._cache[item] = self._encode(item)
        return self._cache[item]

    def _encode(self, item: Item) -> tuple[TokenIds, TokenIds]:
        _refuse_empty(item)
        prompt = tuple(self._tokenizer(item.prompt, verbose=False)["input_ids"])
        both = tuple(self._tokenizer(item.prompt + item.answer, verbose=False)["input_ids"])
        if both[: len(prompt)] != prompt or len(both) == len(prompt):
            raise UsageError(
                f"{item.task}/{item.id}: the tokens of the answer '{item.answer}' do not continue the prompt's; move a "
                "space from the end of the prompt to the front of the answer, or the other way round"
            )
        check_length(item, len(both), self.context)
        return prompt, both[len(prompt) :]


class WordEncoder:
    """Token ids where there is no model: one a word, from a hash of the word.

    The first id stands for the item itself, since the planted engine answers by item: two items with the same words
    are still asked separately.
    """

    context: int | None = None

    def encode(self, item: Item) -> tuple[TokenIds, TokenIds]:
        """Tokens of the prompt and of the answer.

        Raises:
            UsageError: naming the item, if its answer is empty.
        """
        _refuse_empty(item)
        prompt = (f"{item.task}/{item.id}", *item.prompt.split())
        return tuple(map(_word_id, prompt)), tuple(map(_word_id, item.answer.split()))


def check_length(item: Item, tokens: int, context: int | None) -> None:
    """Raises UsageError if an item takes more tokens than the model's context has."""
    if context is not None and tokens > context:
        raise UsageError(
            f"{item.task}/{item.id} takes {tokens} tokens and the model's context has {context}; shorten its "
            "prompt, for example with fewer shots"
        )


def _refuse_empty(item: Item) -> None:
    if not item.answer.strip():
        raise UsageError(f"{item.task}/{item.id}: the answer is empty, so there is nothing to score")


def _word_id(word: str) -> int:
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
