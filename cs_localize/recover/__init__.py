"""From outcomes to heads: sparse solvers, specificity, and whether a head is one to name."""

from cs_localize.recover.convex import ConvexSolver
from cs_localize.recover.count import adds_specific_damage
from cs_localize.recover.evidence import EffectIntervals, bootstrap_intervals, held_back_fit
from cs_localize.recover.lasso import LassoSolver
from cs_localize.recover.naive import MarginalSolver, RidgeSolver
from cs_localize.recover.omp import OmpSolver
from cs_localize.recover.saturating import SaturatingSolver
from cs_localize.recover.solver import SOLVERS, Solver, make_solver
from cs_localize.recover.specificity import (
    SpecificityResult,
    heads_in_order,
    rank_heads,
    specificity,
    universal_heads,
)
from cs_localize.recover.stability import fit_above_chance, selection_frequencies

__all__ = [
    "SOLVERS",
    "ConvexSolver",
    "EffectIntervals",
    "LassoSolver",
    "MarginalSolver",
    "OmpSolver",
    "RidgeSolver",
    "SaturatingSolver",
    "Solver",
    "SpecificityResult",
    "adds_specific_damage",
    "bootstrap_intervals",
    "fit_above_chance",
    "heads_in_order",
    "held_back_fit",
    "make_solver",
    "rank_heads",
    "selection_frequencies",
    "specificity",
    "universal_heads",
]
