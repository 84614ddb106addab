"""Measured beside published: what others report for the same model, tasks and kind of head set."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePath

import yaml
from pydantic import BaseModel, ConfigDict, Field

from cs_localize.findings import ConfirmFile, HeadsFile
from cs_localize.report.numbers import percent


class Published(BaseModel):
    """The values that a paper reports for one model, in percent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(description="The paper.")
    model: str = Field(description="The model, as the last part of its hub id.")
    heads_zeroed: int = Field(description="Heads of each set, zeroed together.")
    found_on: dict[str, list[str]] = Field(description="By head set, the tasks that it was found on.")
    counted: list[str] = Field(description="Tasks whose values are what is left of a count.")
    table: dict[str, dict[str, float]] = Field(description="By task, then by head set; 'base' is the unmodified model.")
    math_curves: dict[str, list[float]] = Field(
        description="By task or group of tasks, with the first k math heads zeroed, k = 0, 1, …."
    )


@dataclass(frozen=True)
class PublishedRow:
    """One task without one set of heads, measured here and published."""

    heads_of: str
    task: str
    heads: str
    before: str
    before_published: str
    after: str
    after_published: str


@cache
def published() -> Published:
    """The published values that come with the package."""
    text = files("cs_localize.report").joinpath("data", "published.yaml").read_text(encoding="utf-8")
    return Published.model_validate(yaml.safe_load(text))


def published_rows(heads: HeadsFile, confirm: ConfirmFile) -> list[PublishedRow]:
    """A row for every confirmed pair of head set and task that has a published value for the study's model.

    A model counts as the published one if the last part of its path or hub id is the same; upper and lower case and a
    leading ``Meta-`` do not matter.
    """
    known = published()
    if _plain(heads.model) != _plain(known.model):
        return []
    rows = []
    for heads_of, drops in confirm.matrix.items():
        head_set = next((name for name, tasks in known.found_on.items() if heads_of in tasks), None)
        if head_set is None:
            continue
        for task, drop in drops.items():
            counts = confirm.counts.get(task)
            if task not in known.table or (task in known.counted and counts is None):
                continue
            values = known.table[task]
            before, after = confirm.baseline[task], drop.accuracy
            if task in known.counted and counts is not None:
                before, after = 1.0, counts.without[heads_of].share
            rows.append(
                PublishedRow(
                    heads_of=heads_of,
                    task=task,
                    heads=f"{len(heads.tasks[heads_of].named)} / {known.heads_zeroed}",
                    before=percent(before),
                    before_published=percent(values["base"] / 100),
                    after=percent(after),
                    after_published=percent(values[head_set] / 100),
                )
            )
    return rows


def _plain(model: str) -> str:
    return PurePath(model).name.lower().removeprefix("meta-")
