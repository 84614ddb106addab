"""What an ablation is measured on, and what a finished study offers to ablate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cs_localize.asking import load_tasks, warn_left_out
from cs_localize.config import EngineConfig, StudyConfig, load_study
from cs_localize.errors import UsageError
from cs_localize.findings import HeadsFile, read_file
from cs_localize.outcomes import Item
from cs_localize.tasks import Capability, get_task

_MEAN_ITEMS = 32  # of each task


@dataclass(frozen=True)
class StudyHeads:
    """What a study offers to an ablation.

    Attributes:
        study: the study's own file.
        heads: its named heads by task, for tasks that have some, and its universal heads under ``universal``.
        engine: the engine it was measured with.
    """

    study: StudyConfig
    heads: dict[str, str]
    engine: EngineConfig

    @property
    def tasks(self) -> tuple[str, ...]:
        """Its tasks and controls."""
        return (*self.study.tasks, *self.study.controls)

    def held_out(
        self, tasks: Sequence[str] | Mapping[str, Capability] = (), limit: int | None = None
    ) -> dict[str, tuple[Item, ...]]:
        """Items that its search did not see, by task; without names, of all its tasks and controls."""
        study = self.study
        known = tasks
        if not isinstance(tasks, Mapping):
            known = load_tasks(tasks or self.tasks, study.lm_eval, study.model, self.engine, study.data)
        return held_out(known, study.seed, limit, study.search_items, study.held_out_items)

    def mean_items(self, tasks: Mapping[str, Capability]) -> tuple[Item, ...]:
        """Items that its search saw, on which means of heads are measured; see ``mean_items``."""
        return mean_items(tasks, self.study.seed, self.study.search_items, self.study.held_out_items)


def of_study(folder: Path) -> StudyHeads:
    """Reads a finished study.

    Raises:
        UsageError: if the folder holds none, or it named no heads.
        CsLocalizeError: if one of its files is damaged.
    """
    if not (folder / "heads.json").is_file():
        raise UsageError(f"{folder} holds no finished study; run one, or give heads with --heads")
    found = read_file(folder / "heads.json", HeadsFile)
    study = load_study(folder / "study.yaml")
    heads = {task: ",".join(finding.named) for task, finding in found.tasks.items() if finding.named}
    if found.universal:
        heads["universal"] = ",".join(found.universal)
    if not heads:
        raise UsageError(f"the study in {folder} named no heads; give some with --heads")
    engine = study.engine
    if engine.name == "planted":
        planted = {"tasks": sorted((*study.tasks, *study.controls)), **engine.planted}
        engine = engine.model_copy(update={"planted": planted})  # whatever is asked, the model is the study's
    return StudyHeads(study, heads, engine)


def held_out(
    tasks: Sequence[str] | Mapping[str, Capability],
    seed: int = 0,
    limit: int | None = None,
    search_items: int | None = None,
    held_out_items: int | None = None,
) -> dict[str, tuple[Item, ...]]:
    """The held-out items of a study with this seed and these sizes, at most ``limit`` a task.

    Args:
        tasks: names of tasks, or tasks by name where ``load_tasks`` read them with options of one's own.
        seed: the study's.
        limit: most items a task.
        search_items: the study's.
        held_out_items: the study's.

    Raises:
        UsageError: if there is no such task, none is named, or a number makes no sense.
    """
    if not tasks:
        raise UsageError("name at least one task; 'cs-localize tasks' lists them")
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit}: ask for at least 1 item")
    if seed < 0:
        raise UsageError(f"--seed {seed}: at least 0 is needed")
    found = {}
    for name, task in _by_name(tasks).items():
        split = task.split(seed, search_items, held_out_items)
        warn_left_out(name, split.left_out)
        found[name] = split.held_out[:limit]
    return found


def mean_items(
    tasks: Sequence[str] | Mapping[str, Capability],
    seed: int = 0,
    search_items: int | None = None,
    held_out_items: int | None = None,
) -> tuple[Item, ...]:
    """Items on whose prompts the means of heads are measured: of each task the first 32 search items of such a study.

    Args:
        tasks: names of tasks, or tasks by name.
        seed: the study's.
        search_items: the study's.
        held_out_items: the study's.
    """
    splits = [task.split(seed, search_items, held_out_items) for task in _by_name(tasks).values()]
    return tuple(item for split in splits for item in split.search[:_MEAN_ITEMS])


def _by_name(tasks: Sequence[str] | Mapping[str, Capability]) -> Mapping[str, Capability]:
    return tasks if isinstance(tasks, Mapping) else {name: get_task(name) for name in tasks}
