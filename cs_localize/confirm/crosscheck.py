"""Heads against neurons: which handle on a capability damages it, and which spares the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cs_localize.config import CrosscheckConfig
from cs_localize.confirm.answers import Answers, Cell, ask, controls_of
from cs_localize.confirm.stats import Pair, spread
from cs_localize.confirm.verdict import Handle, verdict
from cs_localize.errors import UsageError
from cs_localize.findings import (
    ConditionDrop,
    ConfirmFile,
    CrosscheckFile,
    DosePoint,
    ImpactOnPerformance,
    NeuronSet,
    TaskCrosscheck,
)
from cs_localize.heads import Ablation, Head, ModelShape, Neuron
from cs_localize.measure.protocol import Measurer
from cs_localize.neurons.sets import random_neurons
from cs_localize.outcomes import Item
from cs_localize.seeds import stream


@dataclass(frozen=True)
class _Plan:
    """What is zeroed to cross-check one task.

    Attributes:
        target: the task.
        controls: the tasks that control it.
        measured: every task of the study, relatives included.
        heads: the named heads.
        neurons: the located neurons, highest attribution first.
        draws: random neurons.
        drawn_on: the tasks that random neurons are measured on.
        doses: numbers of neurons, increasing; the last is all of them.
        resamples: resamples behind intervals and verdict.
    """

    target: str
    controls: list[str]
    measured: tuple[str, ...]
    heads: tuple[Head, ...]
    neurons: tuple[Neuron, ...]
    draws: list[Ablation]
    drawn_on: tuple[str, ...]
    doses: list[int]
    resamples: int

    @property
    def conditions(self) -> dict[str, Ablation]:
        """The conditions that are one ablation each."""
        return {
            "heads": Ablation.of(self.heads),
            "neurons": Ablation.of(neurons=self.neurons),
            "both": Ablation.of(self.heads, self.neurons),
        }

    def dose(self, count: int) -> Ablation:
        """The first neurons zeroed."""
        return Ablation.of(neurons=self.neurons[:count])

    def cells(self) -> Iterator[Cell]:
        """Everything to measure besides the baseline."""
        for ablation in self.conditions.values():
            yield from ((task, ablation) for task in self.measured)
        for count in self.doses:
            yield from ((task, self.dose(count)) for task in (self.target, *self.controls))
        for ablation in self.draws:
            yield from ((task, ablation) for task in self.drawn_on)


def crosscheck(
    measurer: Measurer,
    held_out: Mapping[str, Sequence[Item]],
    named: Mapping[str, Sequence[Head]],
    neuron_sets: Mapping[str, NeuronSet],
    confirm: ConfirmFile,
    relatives: Mapping[str, Collection[str]],
    shape: ModelShape,
    config: CrosscheckConfig,
    seed: int,
) -> CrosscheckFile:
    """Zeroes named heads, located neurons, both, and random neurons, and compares what the target and the others lose.

    All answers are generated and graded by each task's own metric; what the confirmation asked already comes from the
    ledger. A relative of the target is measured but is no control. A task with nothing named, or no neuron located, is
    measured all the same: zeroing nothing is the baseline.

    Args:
        measurer: who answers.
        held_out: items of every task and control, the ones of the confirmation.
        named: heads the search named, by task.
        neuron_sets: located neurons of every task to cross-check.
        confirm: the confirmation, for its random heads.
        relatives: by task, tasks that do not act as its control; one side's word is enough.
        shape: the model's geometry.
        config: how much to measure.
        seed: seed of random neurons and resamples.

    Raises:
        UsageError: if the confirmation is not of these items or lacks random heads, or a neuron does not exist.
    """
    _check(held_out, named, neuron_sets, confirm)
    plans = [
        _plan(task, held_out, named.get(task, ()), neuron_sets[task], relatives, shape, config, seed)
        for task in neuron_sets
    ]
    answers = ask(measurer, held_out, (cell for plan in plans for cell in plan.cells()), "crosscheck")
    return CrosscheckFile(
        tasks={
            plan.target: TaskCrosscheck(
                neurons=neuron_sets[plan.target],
                conditions=_conditions(answers, plan, seed),
                ipp=_impact(answers, plan, confirm),
                dose=_dose(answers, plan),
                verdict=_verdict(answers, plan, seed),
            )
            for plan in plans
        },
        requests=answers.requests,
        tokens=answers.tokens,
    )


def _check(
    held_out: Mapping[str, Sequence[Item]],
    named: Mapping[str, Sequence[Head]],
    neuron_sets: Mapping[str, NeuronSet],
    confirm: ConfirmFile,
) -> None:
    for task in neuron_sets:
        if task not in held_out:
            raise UsageError(f"task '{task}' has neurons but no held-out items; cross-check it on items of its own")
        if confirm.items.get(task) != len(held_out[task]):
            raise UsageError(f"the confirmation is not of these items of '{task}'; run the confirmation again")
        if named.get(task) and task not in confirm.random:
            raise UsageError("the cross-check compares with random heads; set confirm.random_draws to at least 1")


def _plan(
    target: str,
    held_out: Mapping[str, Sequence[Item]],
    heads: Sequence[Head],
    located: NeuronSet,
    relatives: Mapping[str, Collection[str]],
    shape: ModelShape,
    config: CrosscheckConfig,
    seed: int,
) -> _Plan:
    neurons = tuple(Neuron.parse(name) for name in located.neurons)
    for neuron in neurons:
        shape.check_neuron(neuron)
    rng = stream(seed, "random neurons", target)
    return _Plan(
        target=target,
        controls=controls_of(target, held_out, relatives),
        measured=tuple(held_out),
        heads=tuple(heads),
        neurons=neurons,
        draws=[Ablation.of(neurons=random_neurons(neurons, shape, rng)) for _ in range(config.random_draws)],
        drawn_on=tuple(held_out) if config.random_on == "all" else (target,),
        doses=sorted({count for count in (*config.dose, len(neurons)) if 1 <= count <= len(neurons)}),
        resamples=config.bootstrap,
    )


def _conditions(answers: Answers, plan: _Plan, seed: int) -> dict[str, dict[str, ConditionDrop]]:
    found = {
        name: {
            task: ConditionDrop(
                accuracy=answers.accuracy(task, ablation),
                drop=answers.drop(task, ablation),
                ci=answers.interval(task, ablation, plan.resamples, seed),
            )
            for task in plan.measured
        }
        for name, ablation in plan.conditions.items()
    }
    return {**found, "random_neurons": {task: _over_draws(answers, task, plan.draws) for task in plan.drawn_on}}


def _over_draws(answers: Answers, task: str, draws: Sequence[Ablation]) -> ConditionDrop:
    drops = [answers.drop(task, ablation) for ablation in draws]
    accuracy = float(np.mean([answers.accuracy(task, ablation) for ablation in draws]))
    return ConditionDrop(accuracy=accuracy, drop=float(np.mean(drops)), ci=spread(drops))


def _impact(answers: Answers, plan: _Plan, confirm: ConfirmFile) -> ImpactOnPerformance:
    """IPP as Huang et al. (2025) measure it; with nothing to zero, both sides are the baseline and it is 0."""
    baseline = confirm.baseline[plan.target]
    random_heads = [baseline - drop for drop in confirm.random[plan.target].draws] if plan.heads else [baseline]
    return ImpactOnPerformance(
        heads=answers.accuracy(plan.target, plan.conditions["heads"]) - max(random_heads),
        neurons=answers.accuracy(plan.target, plan.conditions["neurons"])
        - max(answers.accuracy(plan.target, ablation) for ablation in plan.draws),
    )


def _dose(answers: Answers, plan: _Plan) -> list[DosePoint]:
    """The dose curve; empty where a task has no controls to set it against."""
    if not plan.controls:
        return []
    return [
        DosePoint(
            neurons=count,
            target=answers.accuracy(plan.target, plan.dose(count)),
            controls=answers.mean_accuracy(plan.controls, plan.dose(count)),
        )
        for count in plan.doses
    ]


def _verdict(answers: Answers, plan: _Plan, seed: int) -> str:
    heads, neurons = plan.conditions["heads"], plan.conditions["neurons"]
    return verdict(
        plan.target,
        Handle("head", len(plan.heads), *_effects(answers, plan, heads)),
        Handle("neuron", len(plan.neurons), *_effects(answers, plan, neurons)),
        plan.resamples,
        stream(seed, "verdict", plan.target),
    )


def _effects(answers: Answers, plan: _Plan, ablation: Ablation) -> tuple[Pair, list[Pair]]:
    return answers.pair(plan.target, ablation), [answers.pair(task, ablation) for task in plan.controls]
