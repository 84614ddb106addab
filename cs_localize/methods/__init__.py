"""The ways of localizing, behind one interface that counts requests; a study names one of them."""

from cs_localize.methods.attribution import Attribution, head_slopes_from_spec
from cs_localize.methods.counting import CountingMeasurer
from cs_localize.methods.greedy import Greedy
from cs_localize.methods.method import Localization, Method, Narrowed, SparseFit, by_specificity
from cs_localize.methods.registry import METHODS, make_method
from cs_localize.methods.rounds import Rounds, divide
from cs_localize.methods.simple import ExhaustiveSweep, RandomHeads, ThinSweep
from cs_localize.methods.sparse import Sparse
from cs_localize.methods.stepwise import Stepwise
from cs_localize.methods.tables import measure_baseline, measure_designs
from cs_localize.methods.thompson import Thompson

__all__ = [
    "METHODS",
    "Attribution",
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
    "Stepwise",
    "ThinSweep",
    "Thompson",
    "by_specificity",
    "divide",
    "head_slopes_from_spec",
    "make_method",
    "measure_baseline",
    "measure_designs",
]
