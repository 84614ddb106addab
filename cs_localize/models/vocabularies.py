"""Tokenizers of the models made here: one of whole words, one of bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer for lines of words separated by single spaces, each word a token, each newline a token.

    A space belongs to the word after it, so tokens are concatenated to give the text back exactly, and the tokens of
    a prompt are the first tokens of the prompt with its answer.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pieces = [PAD, EOS, UNKNOWN, "\n", *(form for word in words for form in (word, f" {word}"))]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n| ?[^ \n]+"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for any text: each byte of its UTF-8 form is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [PAD, EOS, UNKNOWN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer)


def _wrapped(tokenizer: object) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # not annotated there
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
