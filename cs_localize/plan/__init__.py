"""What a study will cost and find, before it runs."""

from cs_localize.plan.plan import plan_study
from cs_localize.plan.table import plan_lines
from cs_localize.plan.values import Cost, Covered, Expected, Plan, Planned, Rate, Stage, Suggestion, UnitCost, Units

__all__ = [
    "Cost",
    "Covered",
    "Expected",
    "Plan",
    "Planned",
    "Rate",
    "Stage",
    "Suggestion",
    "UnitCost",
    "Units",
    "plan_lines",
    "plan_study",
]
