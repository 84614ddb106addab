"""A study from its file to its report: the only module that strings the rooms together."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cs_localize import __version__
from cs_localize.asking import ask_items, check_options, load_tasks
from cs_localize.config import StudyConfig
from cs_localize.confirm import confirm_heads, crosscheck, head_interactions, random_heads
from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.findings import (
    ConfirmFile,
    CrosscheckFile,
    HeadsFile,
    NeuronSet,
    Provenance,
    Scoring,
    read_file,
    write_file,
    write_text,
)
from cs_localize.folder import StudyResult, clear_folder, load_result, make_folder
from cs_localize.heads import Ablation, Head
from cs_localize.measure.progress import Progress
from cs_localize.measure.protocol import Request
from cs_localize.measure.remote import run_on_worker
from cs_localize.measure.spec import EngineSpec
from cs_localize.methods import head_slopes_from_spec, make_method
from cs_localize.neurons import locate_neurons_from_spec
from cs_localize.outcomes import Item, Outcome
from cs_localize.report import write_report
from cs_localize.results import check_logging, log_confirmation
from cs_localize.scoring import scoring_of
from cs_localize.search import Search, SearchResult
from cs_localize.seeds import stream
from cs_localize.session import Session, open_session, package_versions
from cs_localize.tasks import Capability, Task, content_hash, relatives_of


def run_study(
    config: StudyConfig,
    out: Path,
    command: Sequence[str] = (),
    session: Callable[[Mapping[str, Capability], Progress], AbstractContextManager[Session]] | None = None,
) -> StudyResult:
    """Runs a study, or continues one: whatever the ledger holds is not measured again.

    Args:
        config: the study.
        out: its folder; made when missing.
        command: the command line that runs it, for the report.
        session: opens the session, where several studies run on one ``Bench``; by default the study has its own.

    Raises:
        CsLocalizeError: if anything asked for cannot be had; what was measured stays in the ledger.
    """
    tasks = check_study(config)
    make_folder(out)
    with closing(Progress(out / "events.jsonl")) as progress:
        opened = session(tasks, progress) if session else own_session(config, out, tasks, progress)
        with opened as current:
            # Under the ledger's lock: a second run into this folder has no say in it.
            clear_folder(config, out, current.spec, data_hashes(config, tasks))
            study = Study(config, out, tasks, current, progress)
            found = study.search()
            study.write_heads(found, command)
            confirm = study.confirm(found) if config.confirm.enabled else None
            if config.crosscheck.enabled and confirm:
                study.crosscheck(found.named, confirm)
        return study.finish()


class Study:
    """The stages of one study, over one session."""

    def __init__(
        self, config: StudyConfig, out: Path, tasks: Mapping[str, Capability], session: Session, progress: Progress
    ) -> None:
        self._config = config
        self._out = out
        self._tasks = tasks
        self._session = session
        self._progress = progress
        self._asked = ask_items(config, tasks, session.measurer)
        self._search_items: Mapping[str, Sequence[Item]] = self._asked.search
        self._held_out: Mapping[str, Sequence[Item]] = self._asked.held_out
        self._relatives = relatives_of(tasks)

    def search(self) -> SearchResult:
        """Finds the heads and records the designs, if the method has any."""
        found = Search(
            self._config,
            self._session.shape,
            self._search_items,
            self._relatives,
            self._session.measurer,
            make_method(self._config, self._slopes),
            self._progress.note,
        ).run()
        arrays: dict[str, Any] = {"seed": np.array(self._config.seed)}
        for task, design in found.designs.items():
            arrays |= {f"{task}.masks": design.masks, f"{task}.items": design.items}
        if found.designs:
            np.savez_compressed(self._out / "design.npz", **arrays)
        return found

    def write_heads(self, found: SearchResult, command: Sequence[str]) -> HeadsFile:
        """Writes heads.json."""
        shape, spec = self._session.shape, self._session.spec
        heads = HeadsFile(
            model=self._config.model,
            layers=shape.layers,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            method=self._config.method.name,
            solver=self._config.solver.name if found.localization.sparse else None,
            knock_out=self._config.design.knock_out,
            selected_by=self._config.select.by,
            error_rate=None if self._config.select.by == "naming" else self._config.select.error_rate,
            tasks=found.findings,
            universal=[str(head) for head in found.universal],
            fragile_layers=list(found.fragile),
            sweep_requests=shape.n_heads * max(len(items) for items in self._search_items.values()),
            scoring=self._scoring(found),
            left_out={task: dict(reasons) for task, reasons in self._asked.left_out.items()},
            warnings=[*found.warnings, *self._asked.warnings],
            provenance=Provenance(
                version=__version__,
                command=shlex.join(command),
                engine=spec.fingerprint,
                model_fingerprint=spec.model_fingerprint,
                seed=self._config.seed,
                packages=package_versions(),
                data=data_hashes(self._config, self._tasks),
            ),
        )
        heads = write_file(self._out / "heads.json", heads)
        self._progress.event("heads", named={task: f.named for task, f in found.findings.items()})
        return heads

    def confirm(self, found: SearchResult) -> ConfirmFile:
        """Measures the named heads on held-out items and writes confirm.json."""
        confirm = confirm_heads(
            self._session.measurer,
            self._held_out,
            found.named,
            found.candidates,
            found.universal,
            self._relatives,
            self._session.shape,
            self._config.confirm,
            self._config.seed,
            self._repeat,
        )
        if self._config.confirm.interactions:
            pairs = head_interactions(
                self._session.measurer,
                self._held_out,
                found.named,
                found.universal,
                self._session.shape,
                self._config.confirm,
                self._config.seed,
            )
            confirm = confirm.model_copy(update={"interactions": pairs})
        if self._config.confirm.log_samples:
            log_confirmation(
                self._out / "lm_eval",
                self._session.measurer,
                self._tasks,
                self._held_out,
                found.named,
                found.universal,
                self._config.model,
                self._config.engine.name,
            )
        return write_file(self._out / "confirm.json", confirm)

    def crosscheck(self, named: Mapping[str, Sequence[Head]], confirm: ConfirmFile) -> CrosscheckFile:
        """Locates neurons, sets them against the heads and writes crosscheck.json; tasks that it holds already stay."""
        asked = {*self._checked_before(), *(self._config.crosscheck.tasks or self._config.tasks)}
        files = {task: self._neuron_file(task, named[task]) for task in self._config.tasks if task in asked}
        missing = [task for task, file in files.items() if not file.exists()]
        if missing:
            self._session.measurer.release()  # attribution wants all cores
            for task in missing:
                write_text(files[task], self._locate(task, named[task]).model_dump_json(indent=1))
        sets = {task: read_file(file, NeuronSet) for task, file in files.items()}
        checked = crosscheck(
            self._session.measurer,
            self._held_out,
            named,
            sets,
            confirm,
            self._relatives,
            self._session.shape,
            self._config.crosscheck,
            self._config.seed,
        )
        return write_file(self._out / "crosscheck.json", checked)

    def finish(self) -> StudyResult:
        """Writes the report and the last event, and reads what the study has left on disk."""
        report = write_report(self._out)
        counts = {stage: asdict(count) for stage, count in self._session.measurer.counts.items()}
        self._progress.event("study_finished", report=str(report), counts=counts)
        return load_result(self._out)

    def _checked_before(self) -> list[str]:
        try:
            return list(read_file(self._out / "crosscheck.json", CrosscheckFile).tasks)
        except CsLocalizeError:  # there is none, or none that can be read
            return []

    def _slopes(self, requests: Sequence[Request]) -> NDArray[np.float64]:
        self._session.measurer.release()  # gradients want all cores
        with self._progress.stage("slopes", len(requests)):
            slopes = run_on_worker(head_slopes_from_spec, self._attribution_spec, requests, cores=self._session.cores)
            self._progress.advance(len(requests))
        return slopes

    def _locate(self, task: str, named: Sequence[Head]) -> NeuronSet:
        drawn = random_heads(named, self._session.shape, stream(self._config.seed, "attribution", task))
        with self._progress.stage(f"neurons: {task}", 1):
            neurons, _ = run_on_worker(
                locate_neurons_from_spec,
                self._attribution_spec,
                self._neuron_requests(task),
                self._config.crosscheck,
                named,
                drawn,
                seed=self._config.seed,
                zeroed_items=self._config.crosscheck.zeroed_items,
                cores=self._session.cores,
            )
            self._progress.advance(1)
        return neurons

    @property
    def _attribution_spec(self) -> EngineSpec:
        """The engine that differentiates: gradients of bfloat16 are coarse, and all cores are free then."""
        return self._session.spec.in_transformers(threads=self._session.cores)

    def _neuron_file(self, task: str, named: Sequence[Head]) -> Path:
        """Attribution is not in the ledger; it is kept under a hash of all it depends on."""
        config = self._config.crosscheck
        content = [
            self._attribution_spec.fingerprint,
            [request.key for request in self._neuron_requests(task)],
            [str(head) for head in named],
            [config.zeroed_items, config.steps, config.sigma, self._config.seed],
        ]
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
        return self._out / f"neurons-{task}-{digest}.json"

    def _neuron_requests(self, task: str) -> list[Request]:
        items = self._search_items[task][: self._config.crosscheck.items]
        return [self._session.measurer.request(item, Ablation()) for item in items]

    def _scoring(self, found: SearchResult) -> dict[str, Scoring]:
        sample = {task: items[: self._config.select.items] for task, items in self._search_items.items()}
        return scoring_of(self._tasks, sample, found.named, self._session.measurer)

    def _repeat(self, requests: Sequence[Request]) -> list[Outcome]:
        # Reversed, so that the batches differ: in bf16 an outcome depends a little on what shares its batch.
        again = [replace(request, repeat=1) for request in reversed(requests)]
        return self._session.measurer.measure(again, "noise")[::-1]


def check_study(config: StudyConfig) -> dict[str, Capability]:
    """Refuses what the study file's own validation cannot see, before anything is spent.

    Returns:
        The tasks and controls by name.

    Raises:
        UsageError: if there is no such task, or the method or the engine cannot do what is asked.
    """
    names = (*config.tasks, *config.controls)
    tasks = load_tasks(names, config.lm_eval, config.model, config.engine, config.data)
    check_options(config.lm_eval, tasks)
    if config.confirm.log_samples:
        check_logging(tasks)
    make_method(config)
    data_hashes(config, tasks)
    if config.engine.name == "planted" and config.crosscheck.enabled:
        raise UsageError("the planted engine has no neurons to cross-check; set crosscheck.enabled to false")
    if config.engine.name == "planted" and config.method.name == "attribution":
        raise UsageError("the planted engine has no gradients for the method attribution; name another method")
    return tasks


def data_hashes(config: StudyConfig, tasks: Mapping[str, Capability]) -> dict[str, str]:
    """Hashes of the tasks of the user's own among some tasks, by name, and of the user's own masks as ``design.masks``.

    Raises:
        UsageError: if the masks cannot be read.
    """
    own = {name: task for name, task in tasks.items() if name in config.data}
    hashes = {name: content_hash(task) for name, task in own.items() if isinstance(task, Task)}
    if config.design.masks is None:
        return hashes
    try:
        content = Path(config.design.masks).read_bytes()
    except OSError as error:
        raise UsageError(f"design.masks: cannot read {config.design.masks}: {error.strerror}") from None
    return hashes | {"design.masks": hashlib.sha256(content).hexdigest()[:16]}


def own_session(
    config: StudyConfig, out: Path, tasks: Mapping[str, Capability], progress: Progress
) -> AbstractContextManager[Session]:
    """A session for one study, on the ledger it names or the one in its folder; see ``open_session``."""
    return open_session(config.model, config.engine, tasks, Path(config.ledger or out / "ledger"), progress)
