"""Ablations of heads a researcher has in mind: one of them, or a grid of head sets x scales x tasks."""

from __future__ import annotations

from cs_localize.ablate.conditions import KINDS, AblationGrid, Condition
from cs_localize.ablate.effects import AblationEffect, effects_json, effects_table, grid_table
from cs_localize.ablate.grid import AblationGridResult, ablation_grid
from cs_localize.ablate.items import StudyHeads, held_out, of_study
from cs_localize.ablate.single import ablate

__all__ = [
    "KINDS",
    "AblationEffect",
    "AblationGrid",
    "AblationGridResult",
    "Condition",
    "StudyHeads",
    "ablate",
    "ablation_grid",
    "effects_json",
    "effects_table",
    "grid_table",
    "held_out",
    "of_study",
]
