"""Which heads are knocked out together, in which request, for which item."""

from cs_localize.design.draw import Kind, Unit, draw_design, given_design
from cs_localize.design.given import read_masks
from cs_localize.design.masks import balanced_masks, bernoulli_masks, inclusion_rates
from cs_localize.design.pilot import fragile_layers, pilot_design
from cs_localize.design.requests import Coverage, Design, cycle_items, joined

__all__ = [
    "Coverage",
    "Design",
    "Kind",
    "Unit",
    "balanced_masks",
    "bernoulli_masks",
    "cycle_items",
    "draw_design",
    "fragile_layers",
    "given_design",
    "inclusion_rates",
    "joined",
    "pilot_design",
    "read_masks",
]
