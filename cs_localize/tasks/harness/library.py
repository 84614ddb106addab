"""Finding and loading lm-eval's tasks, and refusing those that cannot be asked before any of their code runs."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from cs_localize.config import check_yaml_folder
from cs_localize.errors import UsageError, one_line
from cs_localize.sandbox import unavailable
from cs_localize.tasks.harness.code import executes, with_stand_ins

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

_NAMES = re.compile(
    rb"""^\s*(?:task|group|tag):[ \t]*["']?([\w\-.:]+)|^[ \t]*-[ \t]+["']?([\w\-.]+)["']?[ \t]*$""", re.MULTILINE
)


def installed() -> bool:
    """Whether lm-evaluation-harness is there. Does not import it."""
    return importlib.util.find_spec("lm_eval") is not None


def known_names(include_path: str | None = None) -> frozenset[str]:
    """Every name that lm-eval's YAML files give to a task, group or tag, and a few words besides.

    lm-eval's own index of them takes many seconds; this tells a misspelt name at once.

    Raises:
        UsageError: if there is no such folder, it holds no YAML file, or one that cannot be read.
    """
    return frozenset(name for folder in _roots(include_path) for name in _scan(folder))


def check_folder(include_path: str | None) -> None:
    """Refuses a folder of the user's own tasks that does not exist or holds no YAML file.

    Raises:
        UsageError: if so.
    """
    if include_path is not None:
        check_yaml_folder(Path(include_path))


def _roots(include_path: str | None) -> list[Path]:
    """Folders of YAML files, the user's own last."""
    check_folder(include_path)
    spec = importlib.util.find_spec("lm_eval")
    roots = [Path(spec.origin).parent / "tasks"] if spec and spec.origin else []
    return [*roots, *([Path(include_path)] if include_path is not None else [])]


@cache
def _scan(root: Path) -> Mapping[str, frozenset[Path]]:
    """By name, the folders whose files may say what it is."""
    found: dict[str, set[Path]] = {}
    for path in root.rglob("*.yaml"):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        for task, item in (match.groups() for match in _NAMES.finditer(content)):
            found.setdefault((task or item).decode(), set()).add(path.parent)
    return {name: frozenset(folders) for name, folders in found.items()}


def load_leaves(
    name: str, include_path: str | None = None, allow_code_execution: bool = False, grades: bool = True
) -> dict[str, ConfigurableTask]:
    """The lm-eval task of that name, or every task of the group or tag of that name.

    Args:
        name: as lm-eval knows it.
        include_path: folder of the user's own YAML files, which come first.
        allow_code_execution: whether tasks are wanted whose grading executes what the model writes; they are marked
            ``unsafe_code``.
        grades: whether answers will be graded; where none is, nothing is executed, and nothing need be allowed.

    Raises:
        UsageError: if lm-eval is not installed, has no such task, the task is of a kind that cannot be asked, its data
            cannot be had, or it would execute what the model writes and must not or cannot.
    """
    if not installed():
        raise UsageError(f"task '{name}' needs lm-evaluation-harness: run pip install 'cs_localize[eval]'")
    for noisy in ("lm_eval", "huggingface_hub"):  # what goes wrong is said in one line below
        logging.getLogger(noisy).setLevel(logging.ERROR)
    manager, leaves = _find(name, include_path)
    executing = {leaf: with_stand_ins(config) for leaf, config in leaves.items() if executes(config)}
    for leaf, config in leaves.items():
        _refuse(leaf, config)
        if leaf in executing:
            _refuse_execution(name, leaf, executing[leaf], allow_code_execution, grades)
    return _load(name, leaves, lambda: _executing(executing) if executing else dict(manager.load([name])["tasks"]))


def _find(name: str, include_path: str | None) -> tuple[TaskManager, dict[str, Mapping[str, Any]]]:
    """An index of the folders that say what a name is, and the unread configuration of every task under it."""
    from lm_eval.tasks import TaskManager

    roots = _roots(include_path)
    wanted, looked_up = {name}, set[str]()
    while True:
        looked_up |= wanted
        folders = [folder for root in roots for folder in _folders(root, looked_up)]
        manager = TaskManager(include_path=[*folders], include_defaults=False)
        _join_tags(manager)
        unknown: set[str] = set()
        leaves = dict(_configs(name, manager, looked_up, unknown))
        wanted = unknown - looked_up
        if not wanted:
            break
    if unknown or not leaves:
        for root in roots:
            _refuse_broken(root, unknown or {name})
        raise UsageError(f"lm-evaluation-harness has no task '{min(unknown or {name})}'")
    return manager, leaves


def _folders(root: Path, names: Collection[str]) -> list[Path]:
    """Folders of one root; of two that describe the same task the first by name counts, and later ones win."""
    scanned = _scan(root)
    return sorted({folder for name in names for folder in scanned.get(name, ())}, reverse=True)


def _refuse_broken(root: Path, names: Collection[str]) -> None:
    """lm-eval passes over files that are not YAML, as if they were not there."""
    for folder in _folders(root, names):
        for path in sorted(folder.glob("*.yaml")):
            content = path.read_bytes()
            if not any(name.encode() in content for name in names):
                continue
            try:
                list(yaml.parse(content))
            except yaml.YAMLError as error:
                raise UsageError(f"{path} is not valid YAML: {one_line(error)}") from None


def _join_tags(manager: TaskManager) -> None:
    """Of a tag that tasks of several folders bear, the index remembers those of one folder."""
    tasks = {name: entry for name, entry in manager.task_index.items() if entry.kind.name != "TAG"}
    for tag, entry in manager.task_index.items():
        if entry.kind.name == "TAG":
            entry.tags |= {name for name, task in tasks.items() if tag in task.tags}


def _configs(
    name: str, manager: TaskManager, looked_up: Collection[str], unknown: set[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The configuration of every task under a name, none of the functions it names imported; unknown members apart."""
    entry = manager.task_index.get(name)
    if entry is None:
        unknown.add(name)
    elif entry.kind.name == "TAG":
        for member in sorted(entry.tags):
            yield from _configs(member, manager, looked_up, unknown)
    elif entry.kind.name == "GROUP":
        yield from _members(entry.cfg or {}, manager, looked_up, unknown)
    else:
        yield name, entry.cfg or {}


def _members(
    group: Mapping[str, Any], manager: TaskManager, looked_up: Collection[str], unknown: set[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    members = group.get("task")
    for member in members if isinstance(members, list) else [members]:
        if isinstance(member, str):
            yield from _configs(member, manager, looked_up, unknown)
        elif isinstance(member, dict) and isinstance(member.get("task"), list):
            yield from _members(member, manager, looked_up, unknown)
        elif isinstance(member, dict):
            named = str(member.get("task", member.get("group")))
            if named in looked_up and named not in manager.task_index:
                yield named, member  # described on the spot
            else:
                yield from _configs(named, manager, looked_up, unknown)


def _refuse(name: str, config: Mapping[str, Any]) -> None:
    if "class" in config:
        raise UsageError(f"task '{name}' is a Python class of lm-evaluation-harness; only its YAML tasks can be asked")
    kind = config.get("output_type", "generate_until")
    if kind not in ("multiple_choice", "loglikelihood", "generate_until"):
        raise UsageError(f"task '{name}' is of kind '{kind}', which asks no question that can be answered right")
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        raise UsageError(f"task '{name}' shows the model images or sounds; only text can be asked")
    if config.get("repeats") not in (None, 1):
        raise UsageError(f"task '{name}' asks every question several times; only single answers can be graded")
    options = config.get("generation_kwargs") or {}
    if not isinstance(options, Mapping):
        raise UsageError(f"task '{name}': its generation_kwargs are no 'option: value' lines")
    if options.get("do_sample") and options.get("temperature", 1.0) not in (0, None):
        raise UsageError(f"task '{name}' draws its answers at random; only the likeliest answer can be asked")


def _refuse_execution(name: str, leaf: str, config: Mapping[str, Any] | None, allowed: bool, grades: bool) -> None:
    """Refuses a task that executes what the model writes, unless that is known how, allowed, and safe here."""
    what = f"task '{leaf}' is graded by executing code that the model writes"
    if config is None:
        raise UsageError(f"{what}, in a way that this version does not know; it knows those of humaneval and mbpp")
    if leaf != name:
        raise UsageError(f"{what}, which no group or tag can bring in, such as '{name}'; name the task itself")
    if grades and not allowed:
        raise UsageError(f"{what}; allow that with --allow-code-execution")
    if grades and unavailable():
        raise UsageError(f"{what}; {unavailable()}")


def _executing(configs: Mapping[str, Mapping[str, Any] | None]) -> dict[str, ConfigurableTask]:
    from lm_eval.api.task import ConfigurableTask

    return {leaf: ConfigurableTask(config=dict(config or {})) for leaf, config in configs.items()}


def _load(
    name: str, leaves: Mapping[str, Mapping[str, Any]], load: Callable[[], dict[str, ConfigurableTask]]
) -> dict[str, ConfigurableTask]:
    import datasets

    datasets.disable_progress_bars()
    sources = sorted({str(config.get("dataset_path")) for config in leaves.values()})
    try:
        return load()
    except (IndexError, StopIteration) as error:
        raise UsageError(
            f"task '{name}': its evaluation split is empty, or has an entry that cannot be read: {one_line(error)}"
        ) from None
    except Exception as error:  # reading a task runs its author's code, and its data come from anywhere
        reason = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
        raise UsageError(
            f"task '{name}' or its data ({', '.join(sources)}) cannot be had: {type(reason).__name__}: "
            f"{one_line(reason, 200)}; without a network the data must be in the Hugging Face cache"
        ) from None
