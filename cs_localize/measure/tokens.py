"""Items as token ids: what is sent to the model, decided once and on the driver."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
            ItemError: if the answer has no tokens, or both together are longer than the context.
            UsageError: if the answer's tokens do not continue the prompt's.
        """
        ...

    def prompt(self, item: Item) -> TokenIds:
        """Tokens of the prompt that an answer is generated to.

        Raises:
            ItemError: as ``encode``.
            UsageError: as ``encode``.
        """
        ...

    def choices(self, item: Item) -> tuple[tuple[TokenIds, TokenIds], ...]:
        """Tokens of every choice of a multiple-choice question, and of the prompt it continues; else nothing.

        Raises:
            ItemError: as ``encode``.
            UsageError: as ``encode``.
        """
        ...


class ItemError(UsageError):
    """An item that this model cannot be asked.

    Attributes:
        reason: why, without naming the item.
    """

    def __init__(self, item: Item, problem: str, reason: str) -> None:
        super().__init__(f"{item.task}/{item.id}{problem}")
        self.reason = reason


def counted(reasons: Iterable[str]) -> str:
    """How many items are left out for each reason, in words."""
    kinds = Counter(reasons)
    return ", ".join(f"{count} for {reason}" for reason, count in kinds.items())


class Encoder:
    """The model's own tokenizer.

    Prompt and answer are tokenized together, as the model would meet them, and split where the prompt's own tokens end.
    Special tokens are those the tokenizer adds to plain text by default (for Llama models the one that begins a text,
    for Qwen models none), unless the prompt begins with that one already, as a chat template makes it.

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
        self._cache: dict[Item, tuple[tuple[TokenIds, TokenIds], ...]] = {}

    def encode(self, item: Item) -> tuple[TokenIds, TokenIds]:
        """Tokens of the prompt and of the answer that continues it.

        Raises:
            ItemError: naming the item, if its answer has no tokens, or is longer together with the prompt than the
                model's context.
            UsageError: naming the item, if its answer does not continue the prompt's tokens.
        """
        return self._encoded(item)[0]

    def prompt(self, item: Item) -> TokenIds:
        """Tokens of the prompt that an answer is generated to; see ``encode``."""
        return self.encode(item)[0] if item.boundary == "strict" else self._ids(item.prompt)

    def choices(self, item: Item) -> tuple[tuple[TokenIds, TokenIds], ...]:
        """Tokens of every choice of a multiple-choice question; see ``encode``."""
        return self._encoded(item)[1:]

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the model's own chat template writes it.

        Args:
            messages: a role and a content each.
            add_generation_prompt: end where the model is to answer; else where the last message is to be continued.

        Raises:
            UsageError: if the tokenizer has no chat template, or it refuses the conversation.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )
        except Exception as error:  # a template is a program of the model's author and raises what it likes
            raise UsageError(f"the model's chat template cannot be applied: {one_line(error, 200)}") from None

    def _encoded(self, item: Item) -> tuple[tuple[TokenIds, TokenIds], ...]:
        """The reference answer, then every choice."""
        if item not in self._cache:
            pairs = ((item.prompt, item.answer), *item.choices)
            self._cache[item] = tuple(self._encode(item, prompt, answer) for prompt, answer in pairs)
        return self._cache[item]

    def _encode(self, item: Item, prompt: str, answer: str) -> tuple[TokenIds, TokenIds]:
        if item.boundary == "lm-eval":
            kept = prompt.rstrip()
            prompt, answer = kept, prompt[len(kept) :] + answer
        else:
            _refuse_empty(item, answer)
        before, both = self._ids(prompt), self._ids(prompt + answer)
        after = both[len(before) :]
        if item.boundary == "strict" and (both[: len(before)] != before or not after):
            raise UsageError(
                f"{item.task}/{item.id}: the tokens of the answer '{answer}' do not continue the prompt's; move a "
                "space from the end of the prompt to the front of the answer, or the other way round"
            )
        if not before:
            raise ItemError(item, ": the prompt is empty; no token would predict its answer", "an empty prompt")
        if not after:
            raise _no_answer(item)
        check_length(item, len(both), self.context)
        return before, after

    def _ids(self, text: str) -> TokenIds:
        first = self._tokenizer.bos_token
        special = not (first and text.startswith(first))
        return tuple(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


class WordEncoder:
    """Token ids where there is no model: one a word, from a hash of the word.

    The first id stands for the item itself, since the planted engine answers by item: two items with the same words
    are still asked separately.
    """

    context: int | None = None

    def encode(self, item: Item) -> tuple[TokenIds, TokenIds]:
        """Tokens of the prompt and of the answer.

        Raises:
            ItemError: naming the item, if its answer is empty.
        """
        _refuse_empty(item, item.answer)
        prompt = (f"{item.task}/{item.id}", *item.prompt.split())
        return tuple(map(_word_id, prompt)), tuple(map(_word_id, item.answer.split()))

    def prompt(self, item: Item) -> TokenIds:
        """Tokens of the prompt."""
        return self.encode(item)[0]

    def choices(self, item: Item) -> tuple[tuple[TokenIds, TokenIds], ...]:
        """Nothing.

        Raises:
            UsageError: if the item has choices, which the planted engine would not tell apart.
        """
        if item.choices:
            raise UsageError(f"task '{item.task}' is multiple-choice, which the planted engine cannot answer")
        return ()


def check_length(item: Item, tokens: int, context: int | None) -> None:
    """Raises ItemError if an item takes more tokens than the model's context has."""
    if context is not None and tokens > context:
        raise ItemError(
            item,
            f" takes {tokens} tokens and the model's context has {context}; shorten its prompt, for example with "
            "fewer shots",
            f"longer than the model's context of {context} tokens",
        )


def _refuse_empty(item: Item, answer: str) -> None:
    if not answer.strip():
        raise _no_answer(item)


def _no_answer(item: Item) -> ItemError:
    return ItemError(item, ": the answer is empty, so there is nothing to score", "an answer without tokens")


def _word_id(word: str) -> int:
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
