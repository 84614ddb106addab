"""Metrics on generated text. Pure functions, shared by the tasks and by every engine that generates."""

from __future__ import annotations


def first_line_equals(text: str, answer: str) -> bool:
    """Whether the first line a model wrote is the answer, both stripped; case and every character count.

    Args:
        text: what the model wrote after the prompt; anything after the first newline is ignored.
        answer: the reference answer.
    """
    return text.partition("\n")[0].strip() == answer.strip()
