"""Ablations of heads a researcher has in mind, one or a grid of head sets x scales x tasks; and none, for baselines."""

from __future__ import annotations

from cs_localize.ablate.conditions import KINDS, AblationGrid, Condition, Scale
from cs_localize.ablate.effects import AblationEffect, effects_json, effects_table, grid_table
from cs_localize.ablate.grid import AblationGridResult, ablation_grid
from cs_localize.ablate.items import StudyHeads, held_out, mean_items, of_study
from cs_localize.ablate.single import ablate
from cs_localize.ablate.unablated import Baseline, baselines, baselines_table

__all__ = [
    "KINDS",
    "AblationEffect",
    "AblationGrid",
    "AblationGridResult",
    "Baseline",
    "Condition",
    "Scale",
    "StudyHeads",
    "ablate",
    "ablation_grid",
    "baselines",
    "baselines_table",
    "effects_json",
    "effects_table",
    "grid_table",
    "held_out",
    "mean_items",
    "of_study",
]
