"""The ways of localizing, behind one interface that counts requests; a study names one of them."""

from cs_localize.methods.attribution import Attribution, head_slopes_from_spec
from cs_localize.methods.counting import CountingMeasurer
from cs_localize.methods.greedy import Greedy
from cs_localize.methods.method import Localization, Method, Narrowed, SparseFit, by_specificity, damage_cap
from cs_localize.methods.registry import METHODS, make_method
from cs_localize.methods.rounds import Rounds, divide, first_tried, items_a_head, mask_share
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
    "damage_cap",
    "divide",
    "first_tried",
    "head_slopes_from_spec",
    "items_a_head",
    "make_method",
    "mask_share",
    "measure_baseline",
    "measure_designs",
]
