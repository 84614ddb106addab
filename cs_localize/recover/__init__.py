"""From outcomes to heads: sparse solvers, specificity, and whether a head is one to name."""

from cs_localize.recover.arrays import TaskArrays, task_arrays
from cs_localize.recover.convex import ConvexSolver
from cs_localize.recover.count import adds_specific_damage
from cs_localize.recover.evidence import EffectIntervals, bootstrap_intervals, held_back_fit, mean_interval
from cs_localize.recover.grouped import GroupSolver
from cs_localize.recover.knockoffs import KnockoffSelection, knockoff_selection
from cs_localize.recover.lasso import LassoSolver
from cs_localize.recover.naive import MarginalSolver, RidgeSolver
from cs_localize.recover.omp import OmpSolver
from cs_localize.recover.refit import refit_heads
from cs_localize.recover.saturating import SaturatingSolver
from cs_localize.recover.solver import SOLVERS, Solver, make_solver
from cs_localize.recover.specificity import (
    SpecificityResult,
    heads_in_order,
    rank_heads,
    specificity,
    universal_heads,
)
from cs_localize.recover.stability import expected_null_selections, fit_above_chance, selection_frequencies
from cs_localize.recover.testing import SingleHeadTests, holm, single_head_tests
from cs_localize.recover.undecided import undecided_heads

__all__ = [
    "SOLVERS",
    "ConvexSolver",
    "EffectIntervals",
    "GroupSolver",
    "KnockoffSelection",
    "LassoSolver",
    "MarginalSolver",
    "OmpSolver",
    "RidgeSolver",
    "SaturatingSolver",
    "SingleHeadTests",
    "Solver",
    "SpecificityResult",
    "TaskArrays",
    "adds_specific_damage",
    "bootstrap_intervals",
    "expected_null_selections",
    "fit_above_chance",
    "heads_in_order",
    "held_back_fit",
    "holm",
    "knockoff_selection",
    "make_solver",
    "mean_interval",
    "rank_heads",
    "refit_heads",
    "selection_frequencies",
    "single_head_tests",
    "specificity",
    "task_arrays",
    "undecided_heads",
    "universal_heads",
]
