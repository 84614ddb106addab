"""The searches a sparse one must beat, behind one interface that counts requests."""

from cs_localize.baselines.counting import CountingMeasurer
from cs_localize.baselines.greedy import Greedy
from cs_localize.baselines.method import Localization, Method, by_specificity
from cs_localize.baselines.simple import ExhaustiveSweep, RandomHeads, ThinSweep

__all__ = [
    "CountingMeasurer",
    "ExhaustiveSweep",
    "Greedy",
    "Localization",
    "Method",
    "RandomHeads",
    "ThinSweep",
    "by_specificity",
]
