"""The pilot: a few requests a layer that show which layers no task can do without."""

from __future__ import annotations

import numpy as np

from cs_localize.design.requests import Design, cycle_items
from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.outcomes import MeasurementTable

_MAD_TO_STD = 1.4826


def pilot_design(
    shape: ModelShape, n_items: int, requests_a_layer: int, heads_a_mask: int, rng: np.random.Generator
) -> Design:
    """Requests that each knock out random heads of a single layer; layers take turns.

    Args:
        shape: geometry of the model.
        n_items: search items of the task.
        requests_a_layer: requests for every layer.
        heads_a_mask: heads knocked out in a request, all of one layer.
        rng: source of heads and items.

    Returns:
        A design of ``layers * requests_a_layer`` requests.

    Raises:
        UsageError: if a layer has fewer heads than asked for, or a count is below one.
    """
    if not 1 <= heads_a_mask <= shape.heads:
        raise UsageError(f"the pilot would knock out {heads_a_mask} heads of a layer; choose 1 to {shape.heads}")
    n_requests = shape.layers * requests_a_layer
    masks = np.zeros((max(n_requests, 0), shape.layers, shape.heads), dtype=bool)
    for request, mask in enumerate(masks):
        mask[request % shape.layers, rng.choice(shape.heads, heads_a_mask, replace=False)] = True
    items = cycle_items(n_requests, n_items, 1, rng)
    return Design(masks.reshape(n_requests, shape.n_heads), items)


def fragile_layers(
    pilot: MeasurementTable, deviations: float = 3.0, least: float = 0.3, floor: float = 8.0
) -> tuple[int, ...]:
    """Layers whose heads hurt all tasks alike, from the outcomes of a pilot.

    A layer's damage is the median over tasks of the mean over a task's requests. (The mean over tasks would also find
    layers in which a single task has its own head, and that head would then be tested too rarely.) A layer is fragile
    where its damage exceeds both the median over layers by ``deviations`` robust standard deviations (1.4826 times the
    median absolute deviation) and ``least``. The second bound keeps a model without fragile layers from having any.

    Args:
        pilot: outcomes of ``pilot_design`` for every task of a study.
        deviations: robust standard deviations above the median.
        least: smallest damage of a fragile layer, in nats.
        floor: cap on the damage of one request, in nats.

    Returns:
        The layers, in ascending order.

    Raises:
        UsageError: if a request knocks out heads of several layers or none, or a task lacks a layer.
    """
    shape = pilot.shape
    touched = pilot.masks.reshape(len(pilot), shape.layers, shape.heads).any(axis=2)
    if not np.all(touched.sum(axis=1) == 1):
        raise UsageError("a pilot knocks out heads of exactly one layer a request; this table is of another design")
    cell = pilot.task * shape.layers + touched.argmax(axis=1)
    cells = len(pilot.tasks) * shape.layers
    counts = np.bincount(cell, minlength=cells)
    if counts.min() == 0:
        task, layer = divmod(int(counts.argmin()), shape.layers)
        raise UsageError(f"the pilot has no request for layer {layer} of task '{pilot.tasks[task]}'")
    means = np.bincount(cell, weights=pilot.damage(floor), minlength=cells) / counts
    damage = np.median(means.reshape(len(pilot.tasks), shape.layers), axis=0)
    middle = np.median(damage)
    spread = _MAD_TO_STD * np.median(np.abs(damage - middle))
    fragile = (damage > middle + deviations * spread) & (damage > least)
    return tuple(int(layer) for layer in np.flatnonzero(fragile))
