"""What a plan says, and what it is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cs_localize.config import StudyConfig
from cs_localize.design.draw import Unit
from cs_localize.heads import ModelShape
from cs_localize.measure.protocol import Mode, Request
from cs_localize.outcomes import Item

Interval = tuple[float, float]


@dataclass(frozen=True)
class Planned:
    """A study as far as it is known before anything is asked.

    Attributes:
        config: the study.
        shape: the model's geometry.
        search: search items by task, in the study's order.
        held_out: held-out items of every task and control.
        relatives: by task, the tasks that do not control it.
        request: an item as it would be sent, scored or generated, without an ablation.
    """

    config: StudyConfig
    shape: ModelShape
    search: Mapping[str, Sequence[Item]]
    held_out: Mapping[str, Sequence[Item]]
    relatives: Mapping[str, frozenset[str]]
    request: Callable[[Item, Mode], Request]

    def controls(self, task: str, among: Mapping[str, Sequence[Item]]) -> list[str]:
        """The tasks that control this one."""
        related = self.relatives.get(task, ())
        return [other for other in among if other != task and other not in related]


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rate(_Value):
    """How much is answered a second."""

    unit: Literal["requests", "tokens"] = Field(description="What is counted.")
    scored: float = Field(description="Of scored requests, a second.")
    generated: float = Field(description="Of generated ones, a second.")
    source: str = Field(description="Where the rate comes from.")


class Cost(_Value):
    """Requests and the tokens that are sent and answered, whether or not a cache serves them."""

    masked: int = Field(description="Requests under an ablation.")
    unablated: int = Field(description="Requests without one.")
    tokens: int = Field(description="Tokens of both; generated answers at their longest.")


class Stage(_Value):
    """What one stage of a study asks."""

    name: str = Field(description="The stage.")
    generated: bool = Field(description="Whether answers are generated rather than scored.")
    at_most: bool = Field(description="Whether the numbers of requests are upper bounds rather than exact.")
    tasks: dict[str, Cost] = Field(description="By task.")
    total: Cost = Field(description="Over all tasks.")
    hours: float | None = Field(description="Duration; null where no rate is known.")


class Expected(_Value):
    """What a simulation of the search finds, as shares over tasks and repeats."""

    requests: int = Field(description="Masked search requests a task, the pilot's included.")
    unit: Unit = Field(description="What shares a mask.")
    trials: int = Field(description="Simulated tasks: repeats times tasks.")
    hit: float = Field(description="Share of trials in which the most specific head comes first.")
    hit_interval: Interval = Field(description="95% Wilson interval of the same; tasks of a repeat count separately.")
    k: int = Field(description="Specific heads planted a task.")
    recall: float = Field(description="Mean share of the k planted heads among the first k of the ranking.")
    recall_interval: Interval = Field(description="95% Wilson interval of the same, wider than needed for a mean.")


class Suggestion(_Value):
    """The smallest budget of the ladder that finds the most specific head often enough."""

    confidence: float = Field(description="The wished hit rate.")
    ladder: list[int] = Field(description="Masked requests a task that were tried, in this order.")
    expected: Expected | None = Field(
        description="The first whose hit rate's lower bound reaches it; null if none does."
    )
    total: Cost | None = Field(description="Cost of the whole study with that budget.")
    hours: float | None = Field(description="Its duration; null where no rate is known.")


class UnitCost(_Value):
    """One way to share masks, at as many computed tokens as the other."""

    computed: float = Field(description="Tokens computed a request under such masks, on average over tasks.")
    expected: Expected | None = Field(description="What the search finds; null where nothing could be simulated.")


class Units(_Value):
    """A mask for every request, or for a block of items: what is computed, and what is found for it."""

    block: int = Field(description="Items asked under one mask, where the unit is a block.")
    shared: dict[str, int] = Field(description="By task, tokens of the prompts that a block computes only once.")
    tokens: int = Field(
        description="Computed tokens of the masked search of all tasks, with its rounds; the same for both."
    )
    request: UnitCost = Field(description="A mask for every request.")
    blocks: UnitCost = Field(description="A mask for a block of items.")
    recommended: Unit = Field(description="Which to use.")
    reason: str = Field(description="Why, in one sentence.")


class Covered(_Value):
    """How well the design of one task tests the heads, before a pilot shows which layers to spare."""

    tests_min: int = Field(description="Different masks that knock out the head tested least.")
    tests_mean: float = Field(description="The same for a head on average.")
    overlap: float = Field(description="Heads that two different masks have in common, on average.")
    coherence: float = Field(description="Largest absolute correlation of two heads over the requests, 0 to 1.")


class Plan(_Value):
    """What a study will cost and find."""

    model: str = Field(description="The model as the study names it.")
    heads: int = Field(description="Query heads of the model.")
    stages: list[Stage] = Field(description="In the order in which they are run.")
    total: Cost = Field(description="Over all stages: an upper bound.")
    hours: float | None = Field(description="Duration of all stages; null where no rate is known.")
    rate: Rate | None = Field(description="The rate behind the hours.")
    coverage: dict[str, Covered] = Field(description="By task, how well the masks test the heads.")
    assumptions: str = Field(description="What the simulation assumes of the model, in one sentence.")
    expected: Expected | None = Field(description="What the search finds; null where nothing could be simulated.")
    suggestion: Suggestion | None = Field(description="A budget for the wished confidence; null if none was wished.")
    units: Units = Field(description="A mask for every request against a mask for a block of items.")
