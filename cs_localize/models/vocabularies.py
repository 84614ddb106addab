"""The tokenizer of the models made here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PAD, _EOS, _UNKNOWN = "<pad>", "<eos>", "<unk>"


def byte_tokenizer(words: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer for any text: a byte of its UTF-8 form is a token, and so are the given words.

    It is byte-level BPE, and the words are added tokens, since transformers and vLLM make a tokenizer of Qwen's kind of
    whatever lies beside a Qwen2 model: of another kind they keep neither the vocabulary nor the way text is split.

    Args:
        words: each becomes a token as it stands and another with one space before it; they are found anywhere in a
            text, the longest first.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [_PAD, _EOS, _UNKNOWN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(form, normalized=False) for word in words for form in (word, f" {word}")])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # not annotated there
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_EOS,
        unk_token=_UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
