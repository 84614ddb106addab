"""What every stage of a study asks: exact where the design fixes it, else an upper bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cs_localize.measure.protocol import Mode
from cs_localize.measure.units import request_tokens
from cs_localize.methods import divide
from cs_localize.outcomes import Item
from cs_localize.plan.values import Cost, Planned, Rate, Stage

Asked = tuple[Sequence[Item], float]
"""Items, and how many times each is asked."""


def stage_costs(planned: Planned, rate: Rate | None = None) -> list[Stage]:
    """The stages in the order in which they are run.

    The requests of the pilot and the search are exact, except that one drawn twice is asked once, and that items may
    yet be left out whose answer is the model's own. A multiple-choice question counts as one request for every choice.
    Tokens are the items' own, at their longest where answers are generated.

    Args:
        planned: the study.
        rate: for the durations.
    """
    config = planned.config
    stages = [_baseline(planned), *_masked_search(planned)]
    if config.lm_eval.reference == "self":
        stages.insert(0, _own_answers(planned))
    if config.select.by == "tests":
        stages.append(_testing(planned))
    stages += [_naming(planned), _scoring(planned)]
    if config.confirm.enabled:
        stages.append(_confirmation(planned))
        if config.confirm.interactions:
            stages.append(_interactions(planned))
    if config.crosscheck.enabled:
        stages.append(_crosscheck(planned))
    return [stage.model_copy(update={"hours": _hours(stage, rate)}) for stage in stages]


def added(costs: Iterable[Cost]) -> Cost:
    """The sum of costs."""
    parts = list(costs)
    return Cost(
        masked=sum(cost.masked for cost in parts),
        unablated=sum(cost.unablated for cost in parts),
        tokens=sum(cost.tokens for cost in parts),
    )


def total_hours(stages: Sequence[Stage]) -> float | None:
    """The duration of all stages; None if no rate is known."""
    known = [stage.hours for stage in stages if stage.hours is not None]
    return sum(known) if known else None


def _hours(stage: Stage, rate: Rate | None) -> float | None:
    if rate is None:
        return None
    amount = stage.total.tokens if rate.unit == "tokens" else stage.total.masked + stage.total.unablated
    return amount / (rate.generated if stage.generated else rate.scored) / 3600


def _own_answers(planned: Planned) -> Stage:
    """The unmodified model answers what lm-evaluation-harness has generated, once."""
    asked = {
        task: [item for item in items if item.boundary == "lm-eval" and item.max_tokens]
        for task, items in planned.search.items()
    }
    tasks = {task: _cost(planned, "generate", [], [(items, 1)]) for task, items in asked.items()}
    return _stage("own answers", tasks, "generate")


def _baseline(planned: Planned) -> Stage:
    tasks = {task: _cost(planned, "score", [], [(items, 1)]) for task, items in planned.search.items()}
    return _stage("baseline", tasks, at_most=planned.config.lm_eval.reference == "self")


def _masked_search(planned: Planned) -> list[Stage]:
    design = planned.config.design
    pilot = design.pilot_requests(planned.shape.layers)

    def stage(name: str, requests: int) -> Stage:
        asked = {task: (items, requests / len(items)) for task, items in planned.search.items()}
        return _stage(name, {task: _cost(planned, "score", [part], []) for task, part in asked.items()})

    masks, *rounds = divide(design.requests, design.rounds)
    stages = [*([stage("pilot", pilot)] if pilot else []), stage("search", masks - pilot)]
    return [*stages, *([_rounds(planned, sum(rounds))] if rounds else [])]


def _rounds(planned: Planned, requests: int) -> Stage:
    """Single heads on a few items drawn at random; the longest bounds the tokens, that of most choices the rest."""
    tasks = {}
    for task, items in planned.search.items():
        drawn_from = items[planned.config.select.reserved :]
        longest = max(_tokens(planned, "score", [item], 1) for item in drawn_from)
        parts = max(_parts(planned, "score", [item]) for item in drawn_from)
        tasks[task] = Cost(masked=requests * parts, unablated=0, tokens=round(requests * longest))
    return _stage("rounds", tasks, at_most=True)


def _testing(planned: Planned) -> Stage:
    """Every candidate alone; one that two tasks share is asked once."""
    select, search = planned.config.select, planned.search
    candidates = min(select.candidates, planned.shape.n_heads)
    tasks = {}
    for task, items in search.items():
        controls = planned.controls(task, search)
        each = -(-select.tests.control_items // len(controls)) if controls else 0
        asked = [items[: select.tests.items], *(search[name][:each] for name in controls)]
        tasks[task] = _cost(planned, "score", [(part, candidates) for part in asked], [])
    return _stage("testing", tasks, at_most=True)


def _naming(planned: Planned) -> Stage:
    """Tries go on while the requests last; a head that did nothing is tried again after each one that is kept."""
    select, search = planned.config.select, planned.search
    unablated = {task: min(select.items, len(items)) for task, items in search.items()}
    tasks = {}
    for task, items in search.items():
        controls = planned.controls(task, search)
        each = -(-select.control_items // len(controls)) if controls else 0
        shared = [item for name in controls for item in search[name][:each]]
        for name in controls:
            unablated[name] = max(unablated[name], min(each, len(search[name])))
        target = items[: select.items]
        a_try = len(target) + len(shared)
        tries = min(select.candidates, planned.shape.n_heads) * select.limit
        most = min(select.requests, tries * a_try) if a_try <= select.requests else 0
        # A try asks the target's items, and the controls' as well if these look promising.
        longest = max(([*target], [*target, *shared]), key=lambda asked: _tokens(planned, "generate", asked, 1))
        mean = max(_tokens(planned, "generate", asked, 1 / len(asked)) for asked in (target, longest))
        parts = max(_parts(planned, "generate", asked) / len(asked) for asked in (target, longest))
        tasks[task] = Cost(masked=round(most * parts), unablated=0, tokens=round(most * mean))
    bare = {task: _cost(planned, "generate", [], [(search[task][:count], 1)]) for task, count in unablated.items()}
    return _stage("naming", {task: added([tasks[task], bare[task]]) for task in tasks}, "generate", at_most=True)


def _scoring(planned: Planned) -> Stage:
    """Scores under the named heads; unablated ones are the baseline's, and what is generated is the naming's."""
    count = planned.config.select.items
    sample = {task: [item for item in items[:count] if item.max_tokens != 0] for task, items in planned.search.items()}
    tasks = {task: _cost(planned, "score", [(items, 1)], []) for task, items in sample.items()}
    return _stage("scoring", tasks, at_most=True)


def _confirmation(planned: Planned) -> Stage:
    """All tasks have named heads, and there are universal ones; the baseline is asked twice, to see the noise."""
    config, held_out = planned.config, planned.held_out
    confirm, select = config.confirm, config.select
    everything: list[Asked] = [(items, 1) for items in held_out.values()]
    curve = min(confirm.curve, planned.shape.n_heads)
    # The point of the curve at which the named heads are zeroed is the matrix's own.
    curve -= 1 if select.limit <= curve else 0
    tasks = {}
    for task, items in held_out.items():
        masked: list[Asked] = [(items, 1)]  # under the universal heads
        if task in planned.search:
            controls: list[Asked] = [(held_out[name], 1) for name in planned.controls(task, held_out)]
            own: list[Asked] = [(items, 1)]
            masked += everything
            masked += _times(own + (controls if confirm.curve_on == "all" else []), curve)
            masked += _times(own + (controls if confirm.random_on == "all" else []), confirm.random_draws)
        tasks[task] = _cost(planned, "generate", masked, [(items, 2)])
    return _stage("confirmation", tasks, "generate", at_most=True)


def _interactions(planned: Planned) -> Stage:
    """As many named heads as may be, no two of one KV group: their pairs, and those with their neighbours."""
    config, shape = planned.config, planned.shape
    named = min(config.select.limit, shape.n_heads)
    neighbours = named * (shape.heads // shape.kv_heads - 1)
    ablations = named + neighbours + named * (named - 1) // 2 + neighbours + 1  # singles, pairs, and all at once
    tasks = {}
    for task in planned.search:
        items = planned.held_out[task][: config.confirm.interaction_items]
        tasks[task] = _cost(planned, "score", [(items, ablations)], [(items, 1)])
    return _stage("interactions", tasks, at_most=True)


def _crosscheck(planned: Planned) -> Stage:
    """What the confirmation has not asked already. Attribution is no request, and not in here."""
    check, held_out = planned.config.crosscheck, planned.held_out
    everything: list[Asked] = [(items, 1) for items in held_out.values()]
    tasks = {}
    for task in check.tasks or planned.config.tasks:
        own: list[Asked] = [(held_out[task], 1)]
        controls: list[Asked] = [(held_out[name], 1) for name in planned.controls(task, held_out)]
        masked = _times(everything, 2)  # neurons, and both
        masked += _times(own + controls, len(check.dose))
        masked += _times(everything if check.random_on == "all" else own, check.random_draws)
        tasks[task] = _cost(planned, "generate", masked, [])
    return _stage("cross-check", tasks, "generate", at_most=True)


def _times(asked: Sequence[Asked], times: int) -> list[Asked]:
    return [(items, each * times) for items, each in asked]


def _stage(name: str, tasks: dict[str, Cost], mode: Mode = "score", at_most: bool = False) -> Stage:
    generated = mode == "generate"
    return Stage(name=name, generated=generated, at_most=at_most, tasks=tasks, total=added(tasks.values()), hours=None)


def _cost(planned: Planned, mode: Mode, masked: Sequence[Asked], unablated: Sequence[Asked]) -> Cost:
    def requests(asked: Sequence[Asked]) -> int:
        return round(sum(_parts(planned, mode, items) * times for items, times in asked))

    return Cost(
        masked=requests(masked),
        unablated=requests(unablated),
        tokens=round(sum(_tokens(planned, mode, items, times) for items, times in (*masked, *unablated))),
    )


def _parts(planned: Planned, mode: Mode, items: Sequence[Item]) -> int:
    return sum(len(planned.request(item, mode).parts) for item in items)


def _tokens(planned: Planned, mode: Mode, items: Sequence[Item], times: float) -> float:
    return times * sum(request_tokens(part) for item in items for part in planned.request(item, mode).parts)
