"""What a study will cost and find, before anything is spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from cs_localize.design.draw import Unit
from cs_localize.errors import UsageError
from cs_localize.measure.planted import PlantedOptions
from cs_localize.methods import Sparse, divide, first_tried, items_a_head, mask_share
from cs_localize.outcomes import Item, MeasurementTable
from cs_localize.plan.costs import added, stage_costs, total_hours
from cs_localize.plan.simulation import (
    PlantedWorld,
    background_of,
    expected,
    fitting,
    usual_repeats,
    wilson,
)
from cs_localize.plan.values import Covered, Expected, Plan, Planned, Rate, Suggestion, UnitCost, Units

_LADDER = (1 / 4, 1 / 2, 3 / 4, 1, 3 / 2, 2, 3, 4)  # in multiples of the study's masked requests a task
_MOST_REPEATS = 1000


def plan_study(
    planned: Planned,
    *,
    rate: Rate | None = None,
    pilot: MeasurementTable | None = None,
    confidence: float | None = None,
    repeats: int | None = None,
    shares_prefixes: bool = True,
) -> Plan:
    """Counts what a study asks, and simulates what it finds.

    Args:
        planned: the study, checked as a run of it would be.
        rate: for durations.
        pilot: outcomes of the study's pilot, where it was run already.
        confidence: hit rate to suggest a budget for.
        repeats: synthetic models to simulate; by default fewer for larger ones.
        shares_prefixes: whether the engine computes a prefix that requests under one mask share only once.

    Raises:
        UsageError: if an option is out of range.
        SolverError: if the solver reaches no solution.
    """
    if confidence is not None and not 0 < confidence < 1:
        raise UsageError(f"--confidence {confidence}: give a share between 0 and 1, such as 0.9")
    if repeats is not None and not 1 <= repeats <= _MOST_REPEATS:
        raise UsageError(f"--repeats {repeats}: give 1 to {_MOST_REPEATS}")
    config, design = planned.config, planned.config.design
    generator, assumptions = _generator(planned, pilot)
    number = repeats or usual_repeats(planned)
    worlds = [PlantedWorld(planned, generator, i) for i in range(number)] if generator else []
    stages = stage_costs(planned, rate)
    units = _units(planned, worlds, shares_prefixes)
    mine = units.request if design.unit == "request" else units.blocks
    suggestion = None
    if confidence is not None and generator:
        if repeats is None:
            needed = -(-_fewest_trials(confidence) // len(planned.search))
            worlds += [PlantedWorld(planned, generator, i) for i in range(number, needed)]
        suggestion = _suggestion(planned, worlds, confidence, rate)
    return Plan(
        model=config.model,
        heads=planned.shape.n_heads,
        stages=stages,
        total=added(stage.total for stage in stages),
        hours=total_hours(stages),
        rate=rate,
        coverage=_coverage(planned),
        assumptions=assumptions,
        expected=mine.expected,
        suggestion=suggestion,
        units=units,
    )


def _generator(planned: Planned, pilot: MeasurementTable | None) -> tuple[PlantedOptions | None, str]:
    """What to plant, and what that assumes in one sentence; nothing where the model has too few heads."""
    given = planned.config.engine.planted if planned.config.engine.name == "planted" else {}
    known = {
        name: value for name, value in given.items() if name not in ("shape", "tasks", "without", "seed", "delay_s")
    }
    generator = fitting(PlantedOptions.parse({"tasks": tuple(planned.search), **known}), planned.shape)
    if generator is None:
        return None, f"{planned.shape.n_heads} heads are too few to plant some for each task, so nothing is simulated"
    source = "assumed, until a pilot was run"
    if pilot is not None:
        generator = background_of(pilot, planned, generator)
        source = "background from the pilot's spread, the rest assumed"
    return generator, (
        f"every task loses {generator.strongest:g} nats to its most specific head and {generator.decay:g} times as "
        f"much to each further one of {generator.n_specific}, all tasks lose to {generator.n_universal} universal "
        f"heads ({generator.universal:g} nats the strongest), each other head does damage of about "
        f"{generator.background:.2g} nats, and scores have noise of {generator.noise:.2g} nats ({source})"
    )


def _coverage(planned: Planned) -> dict[str, Covered]:
    config = planned.config
    method = Sparse(config.design, config.solver, config.seed)
    coverage = method.coverage(planned.shape, method.designs(planned.shape, planned.search))
    return {
        task: Covered(
            tests_min=covered.tests_min,
            tests_mean=covered.tests_mean,
            overlap=covered.overlap,
            coherence=covered.coherence,
        )
        for task, covered in coverage.items()
    }


def _fewest_trials(confidence: float) -> int:
    """Trials after which a budget that misses once still shows the wished hit rate."""
    trials = 2
    while wilson(trials - 1, trials)[0] < confidence and trials < _MOST_REPEATS:
        trials += 1
    return trials


def _suggestion(planned: Planned, worlds: Sequence[PlantedWorld], confidence: float, rate: Rate | None) -> Suggestion:
    design = planned.config.design
    tried: list[int] = []
    for requests in (round(share * design.requests) for share in _LADDER):
        if not worlds[0].has_design(design.unit, requests):
            continue
        tried.append(requests)
        found = expected(worlds, design.unit, requests, confidence)
        if found is not None:
            stages = stage_costs(_with_requests(planned, requests), rate)
            total = added(stage.total for stage in stages)
            return Suggestion(
                confidence=confidence, ladder=tried, expected=found, total=total, hours=total_hours(stages)
            )
    return Suggestion(confidence=confidence, ladder=tried, expected=None, total=None, hours=None)


def _with_requests(planned: Planned, requests: int) -> Planned:
    config = planned.config
    design = config.design.model_copy(update={"requests": requests})
    return replace(planned, config=config.model_copy(update={"design": design}))


def _units(planned: Planned, worlds: Sequence[PlantedWorld], shares_prefixes: bool) -> Units:
    """Both ways to share masks, at the computed tokens of the study as it stands."""
    config, design = planned.config, planned.config.design
    block = min(design.block, *(len(items) for items in planned.search.values()))
    shared = {
        task: _shared_tokens(planned, items, config.engine.block_size) if shares_prefixes else 0
        for task, items in planned.search.items()
    }
    tokens = [
        sum(sum(map(len, _ids(planned, item))) for item in items) / len(items) for items in planned.search.values()
    ]
    fresh, common = sum(tokens) / len(tokens), sum(shared.values()) / len(shared)
    saved = _saved(common, block)
    computed: dict[Unit, float] = {"request": fresh, "block": fresh - saved}
    pilot, share = design.pilot_requests(planned.shape.layers), mask_share(design.rounds)
    masks, *rounds = divide(design.requests, design.rounds)
    # A head that is tried alone is a mask for all items it is tried on, whatever the unit.
    alone = fresh - _saved(common, _items_alone(planned, rounds[0])) if rounds else 0.0
    budget = (masks - pilot) * computed[design.unit] + sum(rounds) * alone
    costs = {}
    for unit, each in computed.items():
        requests = round((budget + pilot * each) / (share * each + (1 - share) * alone))
        requests = design.requests if unit == design.unit else requests
        simulated = worlds and worlds[0].has_design(unit, requests)
        costs[unit] = UnitCost(computed=each, expected=expected(worlds, unit, requests) if simulated else None)
    recommended, reason = _recommended(costs["request"].expected, costs["block"].expected, saved)
    return Units(
        block=block,
        shared=shared,
        tokens=round(budget * len(planned.search)),
        request=costs["request"],
        blocks=costs["block"],
        recommended=recommended,
        reason=reason,
    )


def _saved(shared: float, items: int) -> float:
    """Tokens a request that need not be computed where so many items are asked under one mask."""
    return (items - 1) / items * shared


def _items_alone(planned: Planned, requests: int) -> int:
    """Items on which the second round tries a head."""
    select = planned.config.select
    heads = first_tried(select.limit, planned.shape.n_heads)
    return min(items_a_head(requests, heads), *(len(items) - select.reserved for items in planned.search.values()))


def _recommended(fresh: Expected | None, blocks: Expected | None, saved: float) -> tuple[Unit, str]:
    if fresh is None or blocks is None:
        return "request", "not both could be simulated, and a mask for every request assumes least"
    if not saved:
        return "request", "blocks share no whole block of the cache, so they save no tokens and test fewer masks"
    if (blocks.hit + blocks.recall) > (fresh.hit + fresh.recall):
        return "block", "it finds more for as many computed tokens"
    return "request", "a mask for every request finds no less for as many computed tokens"


def _shared_tokens(planned: Planned, items: Sequence[Item], block_size: int) -> int:
    """Tokens at the start of all prompts that are kept for the requests under one mask: whole blocks of the cache.

    At least one token of a prompt is always computed.
    """
    prompts = [_ids(planned, item)[0] for item in items]
    common = sum(1 for _ in takewhile(lambda ids: len({*ids}) == 1, zip(*prompts, strict=False)))
    longest = min(common, min(map(len, prompts)) - 1)
    return longest // block_size * block_size


def _ids(planned: Planned, item: Item) -> tuple[tuple[int, ...], tuple[int, ...]]:
    request = planned.request(item, "score")
    return request.prompt_ids, request.answer_ids
