"""What a study will cost and find, before it runs."""

from cs_localize.plan.plan import plan_study
from cs_localize.plan.simulation import measured_table, pilot_designs
from cs_localize.plan.table import plan_lines
from cs_localize.plan.values import Cost, Expected, Plan, Planned, Rate, Stage, Suggestion, UnitCost, Units

__all__ = [
    "Cost",
    "Expected",
    "Plan",
    "Planned",
    "Rate",
    "Stage",
    "Suggestion",
    "UnitCost",
    "Units",
    "measured_table",
    "pilot_designs",
    "plan_lines",
    "plan_study",
]
