"""The cross-check in one sentence, and the rule behind its last words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cs_localize.confirm.stats import Flags, Pair, contrast, mean_drop, paired_bootstrap

Conclusion = Literal["heads", "neurons", "neither"]

_WORDS: dict[Conclusion, str] = {
    "heads": "the heads are the more specific handle",
    "neurons": "the neurons are the more specific handle",
    "neither": "neither is shown to be the more specific handle",
}


@dataclass(frozen=True)
class Handle:
    """One way to take a capability away.

    Attributes:
        kind: which sort of unit is zeroed.
        count: how many are zeroed.
        target: flags of the target without and with them zeroed, each ``[n]`` bool.
        controls: the same of every control.
    """

    kind: Literal["head", "neuron"]
    count: int
    target: Pair
    controls: Sequence[Pair]


def conclude(heads: Handle, neurons: Handle, draws: int, rng: np.random.Generator) -> Conclusion:
    """Which handle is the more specific one.

    A handle's specificity is the drop of its target minus the mean drop of the controls. The three conclusions:

    - ``heads``: the 95% interval of the heads' specificity minus the neurons' lies above 0, and so does that of the
      target's drop with the heads zeroed. A handle that takes nothing away is none, however well it spares the rest.
    - ``neurons``: the same the other way round.
    - ``neither``: in all other cases.

    Both conditions are asked on the same items, so the intervals are paired bootstraps over items.

    Args:
        heads: the named heads.
        neurons: the located neurons; on the same items and controls, of which there is at least one.
        draws: resamples behind each interval.
        rng: source of the resamples.
    """
    _, low, high = contrast(
        (neurons.target[1], heads.target[1]),
        [(by_neurons[1], by_heads[1]) for by_neurons, by_heads in zip(neurons.controls, heads.controls, strict=True)],
        draws,
        rng,
    )
    heads_damage = paired_bootstrap(*heads.target, draws, rng)[0] > 0
    neurons_damage = paired_bootstrap(*neurons.target, draws, rng)[0] > 0
    if low > 0 and heads_damage:
        return "heads"
    if high < 0 and neurons_damage:
        return "neurons"
    return "neither"


def verdict(task: str, heads: Handle, neurons: Handle, draws: int, rng: np.random.Generator) -> str:
    """One sentence: what both handles do to the target and to the controls, and what follows.

    Args:
        task: name of the target.
        heads: the named heads.
        neurons: the located neurons.
        draws: resamples behind the conclusion.
        rng: source of the resamples.
    """
    before = f"{task} from {_percent(heads.target[0])}"
    clauses = [_clause(heads, before), _clause(neurons, "it" if heads.count else before)]
    if not heads.count or not neurons.count:
        conclusion = f"there is nothing to compare for {task}"
    elif not heads.controls:
        conclusion = "without controls nothing follows about specificity"
    else:
        conclusion = _WORDS[conclude(heads, neurons, draws, rng)]
    sentence = f"{'; '.join(clauses)}: {conclusion}."
    return sentence[0].upper() + sentence[1:]


def _clause(handle: Handle, target: str) -> str:
    if not handle.count:
        return f"no {handle.kind} is {'named' if handle.kind == 'head' else 'located'}"
    units = f"{handle.count} {handle.kind}{'s' * (handle.count > 1)}"
    clause = f"zeroing {units} takes {target} to {_percent(handle.target[1])}"
    if not handle.controls:
        return clause
    lost = float(np.mean([mean_drop(*control) for control in handle.controls]))
    return f"{clause} and the controls {_change(lost)}"


def _change(lost: float) -> str:
    points = f"{abs(100 * lost):.1f}".removesuffix(".0")
    if points == "0":
        return "lose nothing"
    return f"{'lose' if lost > 0 else 'gain'} {points} point{'s' * (points != '1')}"


def _percent(flags: Flags) -> str:
    return f"{100 * float(np.mean(flags)):.0f}%"
