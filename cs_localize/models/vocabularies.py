"""The tokenizer of the models made here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PAD, _EOS, _UNKNOWN = "<pad>", "<eos>", "<unk>"


def byte_tokenizer(words: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer for any text: a byte of its UTF-8 form is a token, and so are the given words.

    It is byte-level BPE since transformers and vLLM load whatever tokenizer lies beside a Qwen2 model as that. Numbers
    are digit by digit in Qwen's way, a space before them on its own.

    Args:
        words: ASCII words; each becomes a token as it stands and another with one space before it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = _merges(words)
    pieces = [_PAD, _EOS, _UNKNOWN, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # not annotated there
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_EOS,
        unk_token=_UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def _merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs that build every word from its letters, and then join it with the space before it ("Ġ")."""
    merges: dict[tuple[str, str], None] = {}
    # Long words first: of two pairs that overlap the earlier is joined, and " copy" must not begin as " c".
    for word in sorted((word for word in words if not word.isdigit()), key=lambda word: (-len(word), word)):
        merges.update({(word[:end], word[end]): None for end in range(1, len(word))})
        merges[("Ġ", word)] = None
    return list(merges)
