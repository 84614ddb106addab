"""One ablation on some tasks: what a researcher asks when they have heads in mind already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cs_localize.ablate.effects import AblationEffect, effect_on
from cs_localize.ablate.items import held_out, mean_items
from cs_localize.asking import fitting, load_tasks
from cs_localize.config import DataConfig, EngineConfig, LmEvalConfig
from cs_localize.heads import Ablation
from cs_localize.measure.progress import Progress
from cs_localize.results import check_logging, log_answers, make_samples_folder
from cs_localize.session import open_session
from cs_localize.spelling import asks_for_means, check_spelling, spell_out


def ablate(
    model: str,
    heads: str,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    seed: int = 0,
    engine: EngineConfig | None = None,
    ledger: Path,
    samples: Path | None = None,
    lm_eval: LmEvalConfig | None = None,
    data: Mapping[str, DataConfig] | None = None,
) -> list[AblationEffect]:
    """Generates answers with and without an ablation and grades them with each task's own metric.

    Items that do not fit the model are left out, with a warning.

    Args:
        model: a directory, a hub id or a built-in model name.
        heads: what is changed, such as ``L4H2,L7H0=0.5,L9H1=mean,L3N120``; ``L4G1`` is a KV group, ``L4`` a layer, and
            no factor means 0. With ``mean`` a head is replaced by its mean over all token positions of the prompts of
            ``mean_items``.
        tasks: tasks to measure.
        limit: most items a task; they are the held-out items of a study with this seed.
        seed: seed of the split.
        engine: which engine, and how many; vLLM by default.
        ledger: folder of measured outcomes; what it holds is not measured again.
        samples: folder that gets results and every answer as lm-eval writes them, in ``baseline`` and ``ablated``.
        lm_eval: how tasks of lm-evaluation-harness are asked and graded.
        data: where tasks of the user's own come from, by name.

    Raises:
        CsLocalizeError: if anything asked for cannot be had.
    """
    check_spelling(heads)
    engine = engine or EngineConfig()
    known = load_tasks(tasks, lm_eval or LmEvalConfig(), model, engine, data)
    items = held_out(known, seed, limit)
    measured_on = mean_items(known, seed) if asks_for_means(heads) else ()
    if samples is not None:
        check_logging(known)
        make_samples_folder(samples)
    progress = Progress(None)
    with open_session(model, engine, known, ledger, progress, measured_on) as session:
        ablation = Ablation.decode(spell_out(heads, session.shape))
        ablation.check(session.shape)
        items = fitting(items, session.measurer)
        requests = [
            session.measurer.request(item, change, "generate")
            for asked in items.values()
            for change in (Ablation(), ablation)
            for item in asked
        ]
        outcomes = session.measurer.measure(requests, "ablate")
        if samples is not None:
            for name, change in (("baseline", Ablation()), ("ablated", ablation)):
                log_answers(samples / name, session.measurer, known, items, change, model, engine.name)
    effects = []
    start = 0
    for name, asked in items.items():
        flags = [outcome.correct for outcome in outcomes[start : start + 2 * len(asked)]]
        start += 2 * len(asked)
        effects.append(effect_on(name, flags[: len(asked)], flags[len(asked) :], seed))
    return effects
