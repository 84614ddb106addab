"""CNL: the FFN neurons a capability depends on. Importing this loads no torch; ``neurons.attribution`` does."""

from __future__ import annotations

from cs_localize.neurons.sets import (
    Located,
    knowledge_neurons,
    locate,
    overlap,
    pairwise_overlap,
    random_neurons,
    rank,
    split_half,
)
from cs_localize.neurons.task_neurons import locate_neurons, locate_neurons_from_spec

__all__ = [
    "Located",
    "knowledge_neurons",
    "locate",
    "locate_neurons",
    "locate_neurons_from_spec",
    "overlap",
    "pairwise_overlap",
    "random_neurons",
    "rank",
    "split_half",
]
