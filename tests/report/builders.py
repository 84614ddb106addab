"""A study of six tasks on a model of 30 x 9 heads, made up but of the size and shape of a real one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cs_localize.config import StudyConfig, dump_study, parse_study
from cs_localize.findings import (
    ConditionDrop,
    ConfirmFile,
    CrosscheckFile,
    DosePoint,
    Drop,
    HeadPair,
    HeadsFile,
    ImpactOnPerformance,
    Interactions,
    NeuronSet,
    OverlapMeasure,
    PairKind,
    Provenance,
    RandomHeads,
    RankedHead,
    TaskCrosscheck,
    TaskFinding,
    write_file,
)

LAYERS, HEADS = 30, 9
UNIVERSAL = ("L0H1", "L1H7", "L2H0")
NAMED = {
    "antonyms": ["L4H2"],
    "past_tense": ["L7H0", "L12H3"],
    "plurals": ["L9H5", "L12H3", "L14H8"],
    "capitals": ["L17H4", "L18H1"],
    "counting": [],
    "addition": ["L11H6", "L13H0", "L20H2", "L21H7", "L24H3"],
}
BASELINE = {
    "antonyms": 0.77, "past_tense": 0.93, "plurals": 0.95, "capitals": 0.9, "counting": 1.0, "addition": 0.65
}  # fmt: skip
AFTER = {"antonyms": 0.03, "past_tense": 0.22, "plurals": 0.31, "capitals": 0.14, "addition": 0.2}


def study_config(tasks: tuple[str, ...] = tuple(NAMED), **changes: object) -> StudyConfig:
    """The study file that belongs to the findings below."""
    data = {"model": "smollm2-135m-instruct", "tasks": list(tasks), "engine": {"name": "vllm"}, **changes}
    return parse_study(data)


def heads_file() -> HeadsFile:
    """Effects drawn from a seed; named heads stand out for their own task, universal ones for every task."""
    rng = np.random.default_rng(7)
    return HeadsFile(
        model="smollm2-135m-instruct",
        layers=LAYERS,
        heads=HEADS,
        kv_heads=3,
        solver="lasso",
        selected_by="tests",
        error_rate=0.1,
        tasks={task: _finding(task, rng) for task in NAMED},
        universal=list(UNIVERSAL),
        fragile_layers=[0, 1, 2],
        sweep_requests=LAYERS * HEADS * 56,
        warnings=["addition: its 56 search items are few; intervals are wide."],
        provenance=Provenance(
            version="0.1.0",
            command="cs-localize run study.yaml --out runs/demo",
            engine="vllm 0.32.0 bfloat16 9f31c0d2a4b7",
            model_fingerprint="3b1f7c0e5d9a42688fd0",
            seed=0,
            packages={"torch": "2.13.0", "vllm": "0.32.0"},
        ),
    )


def confirm_file() -> ConfirmFile:
    """Named heads take their own task away and leave the others nearly alone."""
    rng = np.random.default_rng(8)
    matrix = {task: {other: _drop(task, other, rng) for other in NAMED} for task in AFTER}
    return ConfirmFile(
        items=dict.fromkeys(NAMED, 60),
        baseline=BASELINE,
        baseline_ci={task: (level - 0.1, min(level + 0.07, 1.0)) for task, level in BASELINE.items()},
        matrix=matrix,
        universal={
            task: Drop(accuracy=0.04, drop=level - 0.04, ci=(level - 0.14, level), p=1e-9, p_holm=2e-8)
            for task, level in BASELINE.items()
        },
        contrast={task: _contrast(task, matrix) for task in AFTER},
        random={task: _random(task, rng) for task in AFTER},
        curve={task: _curve(task, rng) for task in NAMED},
        control_curve={task: [0.87 - 0.012 * k + 0.01 * float(rng.normal()) for k in range(11)] for task in NAMED},
        interactions=Interactions(
            tasks={
                "past_tense": [_pair("L7H0", "L12H3", "backup", 1.25), _pair("L7H0", "L7H1", "additive", 0.02)],
                "plurals": [_pair("L9H5", "L14H8", "redundant", -0.75), _pair("L12H3", "L14H8", "saturated", -3.5)],
            },
            items=dict.fromkeys(("past_tense", "plurals"), 24),
            requests=432,
            tokens=14_688,
        ),
        noise=0.004,
        requests=41_320,
        tokens=2_101_555,
    )


def _pair(first: str, second: str, kind: PairKind, nats: float) -> HeadPair:
    ends = (nats - 0.2, nats + 0.2)
    return HeadPair(
        heads=(first, second),
        kind=kind,
        items=20,
        nats=nats,
        nats_ci=ends,
        log_odds=nats,
        log_odds_ci=ends,
        accuracy=nats / 5,
        accuracy_ci=(nats / 5 - 0.1, nats / 5 + 0.1),
        p=1e-5,
        p_holm=4e-5,
    )


def crosscheck_file() -> CrosscheckFile:
    """The cross-check of the first task alone, as in the demo."""
    return CrosscheckFile(tasks={"antonyms": _crosscheck()}, requests=9_480, tokens=488_010)


def write_study(
    folder: Path,
    heads: HeadsFile | None = None,
    confirm: ConfirmFile | None = None,
    crosscheck: CrosscheckFile | None = None,
    study: StudyConfig | None = None,
) -> Path:
    """A study's folder with the given files; heads and study.yaml are always there."""
    heads = heads or heads_file()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.yaml").write_text(dump_study(study or study_config(tuple(heads.tasks))), encoding="utf-8")
    write_file(folder / "heads.json", heads)
    if confirm:
        write_file(folder / "confirm.json", confirm)
    if crosscheck:
        write_file(folder / "crosscheck.json", crosscheck)
    return folder


def renamed(heads: HeadsFile, old: str, new: str) -> HeadsFile:
    """The same finding with one task called something else."""
    tasks = {new if task == old else task: finding for task, finding in heads.tasks.items()}
    return heads.model_copy(update={"tasks": tasks})


def _finding(task: str, rng: np.random.Generator) -> TaskFinding:
    effects = {f"L{layer}H{head}": float(rng.normal(0.03, 0.09)) for layer in range(LAYERS) for head in range(HEADS)}
    effects |= {head: 1.6 + float(rng.normal(0, 0.2)) for head in UNIVERSAL}
    effects |= {head: 2.3 / (i + 1) ** 0.5 for i, head in enumerate(NAMED[task])}
    order = sorted(effects, key=lambda head: (head in UNIVERSAL, -effects[head]))
    return TaskFinding(
        named=NAMED[task],
        reason=f"{len(NAMED[task])} of 10 candidates reach 80% of their joint damage" if NAMED[task]
        else "no head's interval lies above that of every control",
        ranking=[_ranked(task, head, effects[head], i) for i, head in enumerate(order)],
        search_curve=[0.0, *(4.0 - 3.0 / k for k in range(1, 11))],
        baseline_score=-0.71,
        baseline_accuracy=BASELINE[task],
        items=56,
        tests_a_head=14.0 if task != "addition" else 12.5,
        requests=1010,
        baseline_requests=56,
        tokens=51_233,
        fit=0.81,
        fit_p=0.05,
    )  # fmt: skip


def _ranked(task: str, head: str, effect: float, place: int) -> RankedHead:
    control = next(other for other in NAMED if other != task)
    universal = head in UNIVERSAL
    return RankedHead(
        head=head,
        effect=effect,
        interval=(effect - 0.2, effect + 0.2) if place < 10 else None,
        specificity=-0.8 if universal else effect / 0.25,
        specificity_mean=0.1 if universal else effect / 0.22,
        strongest_control=control,
        frequency=0.9667 if head in NAMED[task] else 0.0333,
        p=0.0123 if place < 10 else None,
        q=0.034 if place < 10 else None,
    )


def _drop(task: str, other: str, rng: np.random.Generator) -> Drop:
    if task == other:
        drop, p = BASELINE[task] - AFTER[task], 1e-8
    else:
        drop, p = float(rng.choice([-0.0167, 0.0, 0.0, 0.0167, 0.0333, 0.05])), 0.4
        drop = max(drop, BASELINE[other] - 1.0)
    return Drop(accuracy=BASELINE[other] - drop, drop=drop, ci=(drop - 0.06, drop + 0.06), p=p, p_holm=min(1.0, p * 36))


def _contrast(task: str, matrix: dict[str, dict[str, Drop]]) -> tuple[float, float, float]:
    others = float(np.mean([drop.drop for other, drop in matrix[task].items() if other != task]))
    difference = matrix[task][task].drop - others
    return difference, difference - 0.09, difference + 0.09


def _random(task: str, rng: np.random.Generator) -> RandomHeads:
    draws = [float(value) for value in np.round(rng.normal(0.01, 0.02, 19), 3)]
    heads = [[f"L{3 + i}H{i % HEADS}"] for i in range(19)]
    return RandomHeads(mean_drop=float(np.mean(draws)), draws=draws, heads=heads, controls=[0.0] * 19)


def _curve(task: str, rng: np.random.Generator) -> list[float]:
    if task not in AFTER:
        return [max(0.0, 1.0 - 0.02 * k) for k in range(11)]
    named = len(NAMED[task])
    fall = (BASELINE[task] - AFTER[task]) / named
    return [
        float(np.clip(BASELINE[task] - fall * min(k, named) + (0.02 * rng.normal() if k > named else 0), 0, 1))
        for k in range(11)
    ]


def _crosscheck() -> TaskCrosscheck:
    others = [task for task in NAMED if task != "antonyms"]
    hit = {"heads": 0.74, "neurons": 0.7, "both": 0.77}
    side = {"heads": 0.004, "neurons": 0.15, "both": 0.16}
    conditions = {
        name: {"antonyms": _condition(0.77, drop), **{t: _condition(BASELINE[t], side[name]) for t in others}}
        for name, drop in hit.items()
    }
    conditions["random_neurons"] = {"antonyms": _condition(0.77, 0.002)}
    return TaskCrosscheck(
        neurons=NeuronSet(
            count=60,
            ratio=0.0013,
            rule="sigma 6",
            neurons=[f"L{i // 2}N{37 * i % 1536}" for i in range(60)],
            items=24,
            completeness=0.997,
            overlap=OverlapMeasure(max=0.61, min=0.7, iou=0.48, chance=0.001),
            knowledge_neurons=OverlapMeasure(max=0.22, min=0.41, iou=0.16, chance=0.0007),
            attribution_with_heads_zeroed=0.18,
            random_attribution_with_heads_zeroed=0.98,
        ),
        conditions=conditions,
        ipp=ImpactOnPerformance(heads=-0.74, neurons=-0.71),
        dose=[
            DosePoint(neurons=n, target=target, controls=controls)
            for n, target, controls in [
                (1, 0.75, 0.89), (2, 0.7, 0.89), (5, 0.52, 0.87), (10, 0.38, 0.84), (20, 0.2, 0.8), (50, 0.08, 0.75),
                (60, 0.07, 0.74),
            ]
        ],
        verdict="Zeroing 1 head takes antonyms from 77% to 3% and the controls lose 0.4 points; zeroing 60 neurons "
        "takes antonyms from 77% to 7% and the controls lose 15 points: the heads are the more specific handle.",
    )  # fmt: skip


def _condition(before: float, drop: float) -> ConditionDrop:
    return ConditionDrop(accuracy=before - drop, drop=drop, ci=(drop - 0.05, drop + 0.05))
