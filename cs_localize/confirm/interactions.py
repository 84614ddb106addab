"""Pairs of heads: which stand in for each other, which lie on one path, and which simply add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import wilcoxon

from cs_localize.config import ConfirmConfig
from cs_localize.errors import UsageError
from cs_localize.findings import HeadPair, Interactions, PairKind
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.measure.protocol import Measurer
from cs_localize.outcomes import Item, Outcome
from cs_localize.recover import holm
from cs_localize.seeds import stream

ROOM = 0.75
"""An item tells about a pair if the two heads' damages add up to at most this share of the damage it can take."""
LEAST = 0.1
"""Interactions within this many nats of 0 are none: curvature alone, and the noise of bfloat16, make as much."""
SIGNIFICANT = 0.05
_FEWEST_ITEMS = 6  # with five, no signed-rank test falls below 0.05

_NOISE = 0.03  # nats, of bfloat16: a score nearer to 0 says no more of the odds

Values = NDArray[np.float64]


@dataclass(frozen=True)
class _Pairs:
    """What is knocked out for one task.

    Attributes:
        task: the task.
        items: held-out items that are asked.
        pairs: named heads with each other and with their neighbours.
        broken: all of these heads and the universal ones: the most damage that is looked for.
    """

    task: str
    items: Sequence[Item]
    pairs: tuple[tuple[Head, Head], ...]
    broken: Ablation

    def ablations(self) -> list[Ablation]:
        """The baseline, the single heads, the pairs, and everything at once."""
        heads = sorted({head for pair in self.pairs for head in pair})
        asked = [Ablation(), *(Ablation.of([head]) for head in heads), *map(Ablation.of, self.pairs), self.broken]
        return list(dict.fromkeys(asked))


@dataclass(frozen=True)
class _Measured:
    """One pair, a value for every item: what both heads do together less what each does alone.

    Attributes:
        nats: ``[items]`` in log-probability.
        log_odds: ``[items]`` in log-odds of the answer.
        accuracy: ``[items]`` in answers lost, from -2 to 1.
        tells: ``[items]`` bool, whether there is room for both damages.
    """

    nats: Values
    log_odds: Values
    accuracy: Values
    tells: NDArray[np.bool_]

    @property
    def saturated(self) -> bool:
        """Whether too few items have room: fewer than half of them, or than a test needs."""
        return int(self.tells.sum()) < max(_FEWEST_ITEMS, len(self.tells) / 2)

    @property
    def used(self) -> NDArray[np.bool_]:
        """The items behind the numbers: those with room, or all where these are too few."""
        return np.ones_like(self.tells) if self.saturated else self.tells


def head_interactions(
    measurer: Measurer,
    held_out: Mapping[str, Sequence[Item]],
    named: Mapping[str, Sequence[Head]],
    universal: Sequence[Head],
    shape: ModelShape,
    config: ConfirmConfig,
    seed: int,
) -> Interactions:
    """Knocks out the named heads of every task in pairs, and with the other query heads of their KV groups.

    For heads a and b the interaction is damage(a and b) - damage(a) - damage(b), item by item, on scored requests. It
    is 0 where damages add up. An item that one head destroys cannot lose the damage of another on top: items count only
    where damage(a) + damage(b) is at most 0.75 of the damage with all heads in question and the universal ones gone,
    and a pair with too few such items is ``saturated``, whatever its numbers. The rest is ``backup`` where the
    interaction lies above 0.1 nats and ``redundant`` where it lies below -0.1, by its whole 95% interval and by
    Wilcoxon's signed-rank test, Holm-corrected over all pairs of the study; otherwise ``additive``. Since a sure answer
    loses little log-probability to its first loss of evidence, and a lost one little more, the sign must be the same in
    log-odds as well.

    Args:
        measurer: who answers; single heads that were scored on these items before come from its ledger.
        held_out: items by task.
        named: heads by task; a task with none has no pairs.
        universal: heads that hurt every task.
        shape: the model's geometry.
        config: how many items, and resamples behind the intervals.
        seed: seed of the resamples.

    Raises:
        UsageError: if the model lacks a head.
    """
    plans = [
        _pairs(task, held_out[task][: config.interaction_items], heads, universal, shape)
        for task, heads in named.items()
        if heads
    ]
    plans = [plan for plan in plans if plan.pairs]
    # Ablation by ablation, so that requests under the same one share their few-shot prefix in the cache.
    requests = [
        measurer.request(item, ablation) for plan in plans for ablation in plan.ablations() for item in plan.items
    ]
    outcomes = measurer.measure(requests, "interactions") if requests else []
    answers = iter(outcomes)
    measured = {plan.task: dict(_measured(plan, answers)) for plan in plans}
    p = [_signed_rank(pair.nats[pair.used]) for pairs in measured.values() for pair in pairs.values()]
    tests = iter(zip(p, holm(np.array(p)).tolist() if p else [], strict=True))
    tokens = {request.key: outcome.tokens for request, outcome in zip(requests, outcomes, strict=True)}
    return Interactions(
        tasks={
            task: [_described(heads, pair, *next(tests), config.bootstrap, seed, task) for heads, pair in pairs.items()]
            for task, pairs in measured.items()
        },
        items={plan.task: len(plan.items) for plan in plans},
        requests=len(tokens),
        tokens=sum(tokens.values()),
    )


def _pairs(
    task: str, items: Sequence[Item], named: Sequence[Head], universal: Sequence[Head], shape: ModelShape
) -> _Pairs:
    if not items:
        raise UsageError(f"task '{task}' has no held-out items; ask for at least 1")
    pairs = [*combinations(named, 2)]
    pairs += [(head, other) for head in named for other in shape.kv_group(head) if other not in named]
    everything = {*universal, *(head for pair in pairs for head in pair)}
    return _Pairs(task, items, tuple(pairs), Ablation.of(everything))


def _measured(plan: _Pairs, answers: Iterator[Outcome]) -> Iterator[tuple[tuple[Head, Head], _Measured]]:
    asked = {ablation: [next(answers) for _ in plan.items] for ablation in plan.ablations()}
    score = {ablation: np.array([outcome.score for outcome in found]) for ablation, found in asked.items()}
    right = {ablation: np.array([outcome.correct for outcome in found], float) for ablation, found in asked.items()}
    odds = {ablation: _log_odds(values) for ablation, values in score.items()}

    def lost(values: Mapping[Ablation, Values], ablation: Ablation) -> Values:
        return values[Ablation()] - values[ablation]

    for pair in plan.pairs:
        together, (first, second) = Ablation.of(pair), (Ablation.of([head]) for head in pair)
        nats, log_odds, accuracy = (
            lost(values, together) - lost(values, first) - lost(values, second) for values in (score, odds, right)
        )
        expected = lost(score, first) + lost(score, second)
        yield pair, _Measured(nats, log_odds, accuracy, expected <= ROOM * lost(score, plan.broken))


def _log_odds(score: Values) -> Values:
    capped = np.minimum(score, -_NOISE)
    return np.asarray(capped - np.log(-np.expm1(capped)))


def _described(
    heads: tuple[Head, Head], pair: _Measured, p: float, p_holm: float, draws: int, seed: int, task: str
) -> HeadPair:
    a, b = map(str, heads)
    rng = stream(seed, "interaction", task, a, b)
    used = pair.used
    picks = rng.integers(int(used.sum()), size=(draws, int(used.sum())))
    values = {name: getattr(pair, name)[used] for name in ("nats", "log_odds", "accuracy")}
    ends = {
        name: tuple(map(float, np.quantile(drawn[picks].mean(axis=1), (0.025, 0.975))))
        for name, drawn in values.items()
    }
    return HeadPair(
        heads=(a, b),
        kind="saturated" if pair.saturated else _kind(ends["nats"], ends["log_odds"], p_holm),
        items=int(pair.tells.sum()),
        nats=float(values["nats"].mean()),
        nats_ci=ends["nats"],
        log_odds=float(values["log_odds"].mean()),
        log_odds_ci=ends["log_odds"],
        accuracy=float(values["accuracy"].mean()),
        accuracy_ci=ends["accuracy"],
        p=p,
        p_holm=p_holm,
    )


def _kind(nats: tuple[float, ...], log_odds: tuple[float, ...], p_holm: float) -> PairKind:
    if p_holm < SIGNIFICANT and nats[0] > LEAST and log_odds[0] > 0:
        return "backup"
    if p_holm < SIGNIFICANT and nats[1] < -LEAST and log_odds[1] < 0:
        return "redundant"
    return "additive"


def _signed_rank(values: Values) -> float:
    """Wilcoxon's signed-rank test, two-sided; 1 where all values are 0."""
    return float(wilcoxon(values).pvalue) if np.any(values) else 1.0
