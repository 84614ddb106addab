"""The verb ``plan``: gathers what a plan needs without asking a model anything, unless told to measure the rate."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cs_localize.ablate_verb import add_allow_code_execution
from cs_localize.errors import CsLocalizeError, UsageError

if TYPE_CHECKING:
    from cs_localize.config import StudyConfig
    from cs_localize.heads import Ablation
    from cs_localize.measure.protocol import Mode, Request
    from cs_localize.measure.spec import EngineSpec
    from cs_localize.measure.tokens import ItemEncoder
    from cs_localize.outcomes import Item, MeasurementTable, Outcome
    from cs_localize.plan import Planned, Rate
    from cs_localize.tasks import Capability

_WARM, _SCORED, _GENERATED = 8, 64, 32
"""Requests of the probe; the first ones load the engine and do not count."""
_SCORING = ("pilot", "search", "round 2", "round 3", "testing", "interactions")
_GENERATING = ("naming", "confirm", "noise", "crosscheck")
"""Stages of a study by what is asked, without the one that loads the engine."""


def add_plan(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb to the command line's."""
    plan = verbs.add_parser("plan", help="what a study will cost and find, before anything is spent")
    plan.add_argument("study", type=Path, metavar="STUDY.yaml", help="the study file")
    plan.add_argument("--out", type=Path, help="folder of an earlier study of the model, for its pilot and its rate")
    plan.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="override an option of the study; may be repeated"
    )
    plan.add_argument("--confidence", type=float, metavar="P", help="suggest a budget whose hit rate is at least P")
    plan.add_argument("--repeats", type=int, metavar="N", help="synthetic models to simulate (default: by size)")
    rate = plan.add_mutually_exclusive_group()
    rate.add_argument("--rate", help="what the engines answer a second, such as 40requests or 2000tokens")
    rate.add_argument("--measure", action="store_true", help="load the engine and measure the rate on a few requests")
    add_allow_code_execution(plan)
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from cs_localize.config import check_files, load_study, named_files
    from cs_localize.plan import plan_lines, plan_study
    from cs_localize.session import engine_spec
    from cs_localize.study import check_study

    config = load_study(arguments.study, tuple(arguments.set))
    check_files(named_files(config), str(arguments.study))
    config = config.allowing(arguments.allow_code_execution)
    if not arguments.measure:  # only a measured rate takes answers that are graded
        config = config.model_copy(update={"lm_eval": config.lm_eval.ungraded()})
    out = arguments.out or Path("runs") / arguments.study.stem
    given = None if arguments.rate is None else _given_rate(arguments.rate)
    tasks = check_study(config)
    spec, encoder = engine_spec(config.model, config.engine, tuple(tasks))
    planned = planned_study(config, spec, encoder, tasks)
    rate = given or (_measured_rate(planned, tasks) if arguments.measure else earlier_rate(out, spec))
    plan = plan_study(
        planned,
        rate=rate,
        pilot=earlier_pilot(planned, Path(config.ledger or out / "ledger"), spec, encoder, tasks),
        confidence=arguments.confidence,
        repeats=arguments.repeats,
        shares_prefixes=spec.name == "vllm",
    )
    print(plan.model_dump_json(indent=1) if arguments.json else "\n".join(plan_lines(plan)))
    return 0


class _NothingMeasured(Exception):
    """Ends a search where it would first ask the model: all that can be refused before has been."""


class _Unasked:
    """A ``Measurer`` that tokenizes and asks nobody."""

    def __init__(self, spec: EngineSpec, encoder: ItemEncoder) -> None:
        self._spec = spec
        self._encoder = encoder

    def request(self, item: Item, ablation: Ablation, mode: Mode = "score") -> Request:
        from cs_localize.measure.measurer import item_request

        return item_request(self._encoder, self._spec, item, ablation, mode)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        raise _NothingMeasured


def planned_study(
    config: StudyConfig, spec: EngineSpec, encoder: ItemEncoder, tasks: Mapping[str, Capability]
) -> Planned:
    """A study as far as it is known before anything is asked, checked as a run of it checks.

    Raises:
        UsageError: if its numbers make no design, an item cannot be asked, or its method is not the sparse one.
    """
    from cs_localize.asking import ask_items
    from cs_localize.heads import Ablation
    from cs_localize.methods import make_method
    from cs_localize.plan import Planned
    from cs_localize.search import Search
    from cs_localize.tasks import relatives_of

    if config.method.name != "sparse":
        raise UsageError(
            f"a plan is for the sparse method, and the study's is '{config.method.name}'; set method: sparse"
        )
    measurer = _Unasked(spec, encoder)
    # The model's own answers are not known before it was asked; the tasks' are as long, more or less.
    gold = config.lm_eval.model_copy(update={"reference": "gold"})
    asked = ask_items(config.model_copy(update={"lm_eval": gold}), tasks, measurer)
    relatives = relatives_of(tasks)
    with suppress(_NothingMeasured):
        Search(config, spec.shape, asked.search, relatives, measurer, make_method(config)).run()

    @cache
    def request(item: Item, mode: Mode) -> Request:
        return measurer.request(item, Ablation(), mode)

    return Planned(config, spec.shape, asked.search, asked.held_out, relatives, request)


class _Recorded(_Unasked):
    """The same, but what a ledger holds is answered from it."""

    def __init__(self, spec: EngineSpec, encoder: ItemEncoder, folder: Path, tasks: Mapping[str, Capability]) -> None:
        from cs_localize.measure.ledger import Ledger

        super().__init__(spec, encoder)
        self._tasks = tasks
        self._ledger = Ledger(folder, spec.fingerprint)

    def measure(self, requests: Sequence[Request], stage: str) -> list[Outcome]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Outcome:
        parts = [self._recorded(part) for part in request.parts]
        return self._tasks[request.item.task].outcome(request.item, parts) if request.choices else parts[0]

    def _recorded(self, request: Request) -> Outcome:
        from cs_localize.measure.ledger import outcome_key

        outcome = self._ledger.get(outcome_key(self._spec.fingerprint, request))
        if outcome is None:
            raise _NothingMeasured
        return outcome


def earlier_pilot(
    planned: Planned, folder: Path, spec: EngineSpec, encoder: ItemEncoder, tasks: Mapping[str, Capability]
) -> MeasurementTable | None:
    """The outcomes of the study's pilot, if a ledger holds them all.

    Raises:
        LedgerError: if the ledger cannot be read.
    """
    from cs_localize.methods import Sparse

    config = planned.config
    if not folder.is_dir():
        return None
    method = Sparse(config.design, config.solver, config.seed)
    with suppress(_NothingMeasured):
        return method.pilot(_Recorded(spec, encoder, folder, tasks), planned.shape, planned.search)
    return None


def earlier_rate(out: Path, spec: EngineSpec) -> Rate | None:
    """Requests a second in an earlier study's folder; None if there is none of this engine and model."""
    from cs_localize.findings import HeadsFile, read_file
    from cs_localize.plan import Rate

    try:
        if read_file(out / "heads.json", HeadsFile).provenance.engine != spec.fingerprint:
            return None
        lines = (out / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except (CsLocalizeError, OSError, UnicodeDecodeError):
        return None
    measured: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for event in filter(None, map(_stage_event, lines)):
        measured[event["stage"]] += event["done"] - event["served"]
        seconds[event["stage"]] += event["seconds"]
    rates = [_rate_of(stages, measured, seconds) for stages in (_SCORING, _GENERATING)]
    known = [rate for rate in rates if rate]
    if not known:
        return None
    scored, generated = (rate or known[0] for rate in rates)
    return Rate(unit="requests", scored=scored, generated=generated, source=f"as measured in {out}")


def _stage_event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:  # half a line, of a driver that was killed
        return None
    ended = isinstance(event, dict) and event.get("event") in ("stage_finished", "stage_stopped")
    return event if ended and event["done"] > event["served"] else None


def _rate_of(stages: Sequence[str], measured: Counter[str], seconds: Counter[str]) -> float:
    spent = sum(seconds[stage] for stage in stages)
    return sum(measured[stage] for stage in stages) / spent if spent else 0.0


def _given_rate(text: str) -> Rate:
    from cs_localize.plan import Rate

    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(request|token)s?", text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"--rate {text}: give what is answered a second, such as 40requests or 2000tokens")
    unit: Literal["requests", "tokens"] = "requests" if match[2] == "request" else "tokens"
    return Rate(unit=unit, scored=float(match[1]), generated=float(match[1]), source="as given")


def _measured_rate(planned: Planned, tasks: Mapping[str, Capability]) -> Rate:
    """Tokens a second under random masks, through the real engines; the outcomes are not kept."""
    from cs_localize.heads import Ablation
    from cs_localize.measure.progress import Progress
    from cs_localize.plan import Rate
    from cs_localize.seeds import stream
    from cs_localize.session import open_session

    config, shape = planned.config, planned.shape
    rng = stream(config.seed, "rate")
    items = [item for part in zip(*planned.search.values(), strict=False) for item in part]
    masked = max(1, round(config.design.density * shape.n_heads))

    with (
        tempfile.TemporaryDirectory() as folder,
        open_session(config.model, config.engine, tasks, Path(folder), Progress(None)) as session,
    ):

        def tokens_a_second(count: int, mode: Mode) -> float:
            requests = []
            for number in range(count):
                heads = (shape.head(int(i)) for i in rng.choice(shape.n_heads, masked, replace=False))
                requests.append(session.measurer.request(items[number % len(items)], Ablation.of(heads), mode))
            started = time.perf_counter()
            outcomes = session.measurer.measure(requests, "rate")
            return sum(outcome.tokens for outcome in outcomes) / (time.perf_counter() - started)

        tokens_a_second(_WARM, "score")
        scored, generated = tokens_a_second(_SCORED, "score"), tokens_a_second(_GENERATED, "generate")
    return Rate(
        unit="tokens", scored=scored, generated=generated, source=f"measured on {_SCORED} and {_GENERATED} requests"
    )
