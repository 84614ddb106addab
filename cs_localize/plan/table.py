"""A plan as a short table."""

from __future__ import annotations

import textwrap

from cs_localize.plan.values import Cost, Covered, Expected, Interval, Plan, Rate, Stage, Suggestion, UnitCost, Units

_WIDTH = 100
_WIDTHS = (14, 12, 12, 14, 8)
_NO_RATE = (
    "hours: no rate is known; give one with --rate, such as '--rate 40requests', or measure it with --measure, or name "
    "the folder of an earlier study of this model with --out"
)


def plan_lines(plan: Plan) -> list[str]:
    """The plan for a terminal."""
    tasks = list(dict.fromkeys(task for stage in plan.stages for task in stage.tasks))
    lines = [f"{plan.model}: {plan.heads:,} heads", ""]
    lines.append(_line("stage", "masked", "unablated", "tokens", "hours"))
    lines.append(_line(*("-" * width for width in _WIDTHS)))
    lines += [_cost_line(stage.name, stage.total, stage.at_most, stage.hours) for stage in plan.stages]
    lines.append(_cost_line("in all", plan.total, True, plan.hours))
    lines += ["", "by task"]
    lines += [_task_line(task, plan.stages) for task in tasks]
    lines += ["", "<= is an upper bound: it depends on the heads that are found, and answers end sooner."]
    lines += _wrapped(_rate_text(plan.rate) if plan.rate else _NO_RATE)
    lines += _wrapped(_coverage_text(list(plan.coverage.values())))
    lines += ["", *_simulated(plan)]
    if plan.suggestion:
        lines += _wrapped(_suggestion_text(plan.suggestion))
    return [*lines, "", *_units(plan.units)]


def _line(name: str, *numbers: str) -> str:
    parts = [name.ljust(_WIDTHS[0])]
    parts += [number.rjust(width) for number, width in zip(numbers, _WIDTHS[1:], strict=False)]
    return "  ".join(parts).rstrip()


def _cost_line(name: str, cost: Cost, at_most: bool, hours: float | None) -> str:
    sign = "<= " if at_most else ""
    duration = "" if hours is None else f"{sign}{_hours(hours)}"
    return _line(name, *(f"{sign}{number:,}" for number in (cost.masked, cost.unablated, cost.tokens)), duration)


def _task_line(task: str, stages: list[Stage]) -> str:
    parts = [(stage, stage.tasks[task]) for stage in stages if task in stage.tasks]
    at_most = any(stage.at_most for stage, _ in parts)
    total = Cost(
        masked=sum(cost.masked for _, cost in parts),
        unablated=sum(cost.unablated for _, cost in parts),
        tokens=sum(cost.tokens for _, cost in parts),
    )
    return _cost_line(task, total, at_most, None)


def _rate_text(rate: Rate) -> str:
    each = f"{rate.scored:,.1f}"
    if rate.generated != rate.scored:
        each += f" {rate.unit} a second when scored and {rate.generated:,.1f} when generated"
    else:
        each += f" {rate.unit} a second"
    return f"hours: at {each}, {rate.source}"


def _coverage_text(coverage: list[Covered]) -> str:
    """The tasks' designs differ by chance alone, so one range tells of all."""
    least, mean = min(covered.tests_min for covered in coverage), coverage[0].tests_mean
    shared = sum(covered.overlap for covered in coverage) / len(coverage)
    return (
        f"coverage: at least {least} different masks a head and {mean:.1f} on average, fewer in layers that turn out "
        f"fragile; two masks share {shared:.2g} heads; coherence {max(covered.coherence for covered in coverage):.2f}"
    )


def _simulated(plan: Plan) -> list[str]:
    if plan.expected is None:
        return _wrapped(f"expected: {plan.assumptions}.")
    found = _found(plan.expected)
    return [*_wrapped(f"expected: {found}."), *_wrapped(f"Simulated: {plan.assumptions}.")]


def _found(expected: Expected) -> str:
    return (
        f"the most specific head first in {_share(expected.hit, expected.hit_interval)}; "
        f"recall@{expected.k} {_share(expected.recall, expected.recall_interval)} ({expected.trials} simulated tasks)"
    )


def _suggestion_text(suggestion: Suggestion) -> str:
    tried = ", ".join(f"{requests:,}" for requests in suggestion.ladder)
    if suggestion.expected is None or suggestion.total is None:
        return (
            f"confidence {suggestion.confidence:g}: no budget of {tried} requests a task showed it; other budgets, or "
            "more --repeats, which narrow the interval"
        )
    duration = "" if suggestion.hours is None else f", {_hours(suggestion.hours)} hours"
    return (
        f"confidence {suggestion.confidence:g}: design.requests {suggestion.expected.requests:,} is the smallest of "
        f"{tried} whose hit rate's lower bound reaches it: {_found(suggestion.expected)}; at most "
        f"{suggestion.total.masked + suggestion.total.unablated:,} requests and {suggestion.total.tokens:,} tokens in "
        f"all{duration}"
    )


def _units(units: Units) -> list[str]:
    lines = _wrapped(f"masks: design.unit {units.recommended}, since {units.reason}.")
    lines.append(f"at {units.tokens:,} computed tokens of the masked search:")
    names = {"a mask a request": units.request, f"a mask for {units.block} items": units.blocks}
    return lines + [line for name, cost in names.items() for line in _unit_lines(name, cost)]


def _unit_lines(name: str, cost: UnitCost) -> list[str]:
    text = f"{name:<19} {cost.computed:,.1f} tokens a request"
    if cost.expected is None:
        return [f"  {text}"]
    found = cost.expected
    return [
        f"  {text}, {found.requests:,} requests a task: first {_share(found.hit, found.hit_interval)}, "
        f"recall@{found.k} {_share(found.recall, found.recall_interval)}"
    ]


def _share(share: float, interval: Interval) -> str:
    return f"{share:.0%} [{interval[0]:.0%}, {interval[1]:.0%}]"


def _hours(hours: float) -> str:
    return f"{hours:.2f}" if hours >= 0.1 else f"{hours:.3f}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
