"""What an answer is worth. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def first_line_equals(text: str, answer: str) -> bool:
    """Whether the first line a model wrote is the answer, both stripped; case and every character count.

    Args:
        text: what the model wrote after the prompt; anything after the first newline is ignored.
        answer: the reference answer.
    """
    return text.partition("\n")[0].strip() == answer.strip()


def margin(scores: Sequence[float], gold: Collection[int]) -> float:
    """Log-probability (nats) of the likeliest right choice minus that of the likeliest wrong one.

    Args:
        scores: log-probability of every choice, at least one of them right and one wrong.
        gold: positions of the right ones.
    """
    right = [score for position, score in enumerate(scores) if position in gold]
    wrong = [score for position, score in enumerate(scores) if position not in gold]
    return max(right) - max(wrong)
