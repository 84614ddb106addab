"""Which items a study asks: the splits of its tasks, without what the model cannot be asked."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cs_localize.config import DataConfig, EngineConfig, LmEvalConfig, StudyConfig
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation
from cs_localize.measure.progress import Progress
from cs_localize.measure.protocol import Measurer
from cs_localize.measure.tokens import Encoder, ItemError, counted
from cs_localize.models import resolve
from cs_localize.outcomes import Item
from cs_localize.tasks import Capability, find_tasks
from cs_localize.tasks.harness import HarnessTask, check_folder, known_names

_LOG = logging.getLogger("cs_localize")
_WRONG = "answered wrongly by the unmodified model, so that it has no answer of its own"


@dataclass(frozen=True)
class Asked:
    """The items of a study.

    Attributes:
        search: search items by task to localize.
        held_out: held-out items of every task and control.
        left_out: by task, questions of either side that are not asked, with the reason; tasks without any are missing.
    """

    search: Mapping[str, tuple[Item, ...]]
    held_out: Mapping[str, tuple[Item, ...]]
    left_out: Mapping[str, Mapping[str, str]]

    @property
    def warnings(self) -> list[str]:
        """How many questions of each task are not asked, and why."""
        return [_told(task, reasons) for task, reasons in self.left_out.items()]


def load_tasks(
    names: Iterable[str],
    options: LmEvalConfig,
    model: str,
    engine: EngineConfig,
    data: Mapping[str, DataConfig] | None = None,
) -> dict[str, Capability]:
    """Tasks by name.

    Args:
        names: of built-in tasks, of the user's own, or of lm-evaluation-harness's.
        options: how the last are asked and graded.
        model: the model whose chat template they may want.
        engine: what answers.
        data: where the user's own come from, by name.

    Raises:
        UsageError: if there is no such task, it cannot be asked, or the model has no chat template where one is wanted.
    """
    check_folder(options.include_path)
    chat = None
    if options.chat_template:
        if engine.name == "planted":
            raise UsageError("the planted engine has no chat template; set lm_eval.chat_template to false")
        chat = Encoder(resolve(model).path, engine.trust_remote_code).chat
    return find_tasks(names, data or {}, options, chat)


def check_options(options: LmEvalConfig, tasks: Mapping[str, Capability]) -> None:
    """Refuses options for tasks that lm-evaluation-harness does not have, which a misspelt name would be.

    Tasks that it has and the study does not ask are let pass: the studies of a grid share their options.

    Args:
        options: how tasks of lm-evaluation-harness are asked and graded.
        tasks: all tasks and controls of the study, by name.

    Raises:
        UsageError: if an option is for a task that is not there.
    """
    asked = [task for task in tasks.values() if isinstance(task, HarnessTask)]
    known = {name for task in asked for name in (task.name, *task.members)}
    for option, values in (("metric", options.metric), ("num_fewshot", options.num_fewshot)):
        for name in values:
            if name not in known and name not in known_names(options.include_path):
                raise UsageError(
                    f"lm_eval.{option} names '{name}', which is no task of lm-evaluation-harness; this study has "
                    f"{', '.join(sorted(known)) or 'none'}"
                )


def ask_items(config: StudyConfig, tasks: Mapping[str, Capability], measurer: Measurer) -> Asked:
    """Splits the tasks, and leaves out what does not fit the model.

    With ``reference: self`` the unmodified model first answers the search items of tasks of lm-evaluation-harness whose
    answers are generated; what it wrote is the reference answer of those it got right, and the others are left out.

    Raises:
        MeasurementError: if an answer cannot be measured.
        UsageError: if nothing is left of a side.
    """
    search: dict[str, tuple[Item, ...]] = {}
    held_out: dict[str, tuple[Item, ...]] = {}
    left_out: dict[str, dict[str, str]] = {}
    for name, task in tasks.items():
        split = task.split(config.seed, config.search_items, config.held_out_items)
        reasons = dict(split.left_out)
        if name in config.tasks:
            search[name] = _fitting(split.search, measurer, reasons)
        held_out[name] = _fitting(split.held_out, measurer, reasons)
        left_out[name] = reasons
    if config.lm_eval.reference == "self":
        search = _own_answers(search, measurer, left_out)
    for sides in (search, held_out):
        for name, items in sides.items():
            if not items:
                reason = next(iter(left_out[name].values()))
                raise UsageError(f"task '{name}': every item of a side is left out: {reason}")
    return Asked(search, held_out, {name: reasons for name, reasons in left_out.items() if reasons})


def fitting(
    items: Mapping[str, Sequence[Item]], measurer: Measurer, progress: Progress | None = None
) -> dict[str, tuple[Item, ...]]:
    """The items of some tasks without those that a study would leave out because they do not fit the model.

    Args:
        items: the items by task.
        measurer: knows what fits.
        progress: records what is left out.

    Raises:
        UsageError: if nothing is left of a task.
    """
    kept: dict[str, tuple[Item, ...]] = {}
    for name, asked in items.items():
        reasons: dict[str, str] = {}
        kept[name] = _fitting(asked, measurer, reasons)
        if asked and not kept[name]:
            raise UsageError(f"task '{name}': every item is left out: {next(iter(reasons.values()))}")
        warn_left_out(name, reasons)
        if reasons and progress is not None:
            progress.event("left_out", task=name, items=reasons)
    return kept


def warn_left_out(task: str, reasons: Mapping[str, str]) -> None:
    """Warns of items of a task that are not asked, if there are any.

    Args:
        task: the task's name.
        reasons: why each is left out, by the item's id.
    """
    if reasons:
        _LOG.warning("%s", _told(task, reasons))


def _told(task: str, reasons: Mapping[str, str]) -> str:
    return f"{task}: {len(reasons)} items left out: {counted(reasons.values())}"


def _fitting(items: Sequence[Item], measurer: Measurer, reasons: dict[str, str]) -> tuple[Item, ...]:
    fitting = []
    for item in items:
        try:
            measurer.request(item, Ablation(), "score")
            measurer.request(item, Ablation(), "generate")
        except ItemError as error:
            reasons[item.id] = error.reason
        else:
            fitting.append(item)
    return tuple(fitting)


def _own_answers(
    search: Mapping[str, tuple[Item, ...]], measurer: Measurer, left_out: Mapping[str, dict[str, str]]
) -> dict[str, tuple[Item, ...]]:
    asked = [item for items in search.values() for item in items if item.boundary == "lm-eval" and item.max_tokens]
    requests = [measurer.request(item, Ablation(), "generate") for item in asked]
    outcomes = dict(zip(asked, measurer.measure(requests, "own answers"), strict=True)) if asked else {}
    kept: dict[str, tuple[Item, ...]] = {}
    for name, items in search.items():
        own = []
        for item in items:
            if item in outcomes and not outcomes[item].correct:
                left_out[name][item.id] = _WRONG
            else:
                own.append(replace(item, answer=outcomes[item].text) if item in outcomes else item)
        kept[name] = _fitting(own, measurer, left_out[name])
    return kept
