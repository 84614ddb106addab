"""The ways of localizing, behind one interface that counts requests; a study names one of them."""

from cs_localize.methods.counting import CountingMeasurer
from cs_localize.methods.greedy import Greedy
from cs_localize.methods.method import Localization, Method, Narrowed, SparseFit, by_specificity
from cs_localize.methods.registry import METHODS, make_method
from cs_localize.methods.rounds import Rounds, divide
from cs_localize.methods.simple import ExhaustiveSweep, RandomHeads, ThinSweep
from cs_localize.methods.sparse import Sparse
from cs_localize.methods.tables import measure_baseline, measure_designs

__all__ = [
    "METHODS",
    "CountingMeasurer",
    "ExhaustiveSweep",
    "Greedy",
    "Localization",
    "Method",
    "Narrowed",
    "RandomHeads",
    "Rounds",
    "Sparse",
    "SparseFit",
    "ThinSweep",
    "by_specificity",
    "divide",
    "make_method",
    "measure_baseline",
    "measure_designs",
]
