"""The choices that the published description of CNL leaves open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Target = Literal["probability", "log_probability"]
Answer = Literal["gold", "generated"]
Statistics = Literal["model", "layer"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How CNL is read here; the full formulas of Huang et al. (arXiv 2502.20992) are not public.

    Attributes:
        target: integrate the probability of each answer token, or its logarithm.
        answer: attribute the reference answer, or the one the model writes itself.
        statistics: threshold over all neurons of the model, or over each layer by itself.
    """

    target: Target = "probability"
    answer: Answer = "gold"
    statistics: Statistics = "model"
