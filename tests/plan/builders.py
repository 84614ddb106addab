"""Studies to plan: small, planted, with made-up items where their tokens matter."""

from __future__ import annotations

from dataclasses import replace

from cs_localize.config import StudyConfig
from cs_localize.heads import Ablation
from cs_localize.measure.protocol import Mode, Request
from cs_localize.outcomes import Item
from cs_localize.plan import Planned
from cs_localize.plan_verb import planned_study
from cs_localize.session import engine_spec
from cs_localize.study import check_study
from tests.studies import planted_config


def planned(config: StudyConfig | None = None, **changes: object) -> Planned:
    """A planted study as the verb would plan it."""
    config = config or planned_config(**changes)
    tasks = check_study(config)
    spec, encoder = engine_spec(config.model, config.engine, tuple(tasks))
    return planned_study(config, spec, encoder, tasks)


def planned_config(**changes: object) -> StudyConfig:
    """Two tasks and few requests, unless changed."""
    return planted_config(**{"tasks": ["antonyms", "capitals"], "design__requests": 300, **changes})


def with_prompts(study: Planned, shots: int, question: int, answer: int = 1) -> Planned:
    """The same study with prompts of so many tokens, the shots the same for all items."""

    def request(item: Item, mode: Mode) -> Request:
        number = study.request(item, "score").prompt_ids[0]
        prompt = (*range(1, shots + 1), *range(number, number + question))
        return Request(item, prompt, tuple(range(answer)), Ablation(), mode, 2 * answer + 2)

    return replace(study, request=request)
