"""The study file: everything a user can choose, validated before anything is spent."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cs_localize.errors import UsageError
from cs_localize.options import dump_options, read_options

_LARGEST = 2**63 - 1
"""Of every whole number: what an array can hold."""

_OPTIONS = "give options, as 'name: value' lines"
_EXPECTED = {
    "dict_type": _OPTIONS,
    "model_type": _OPTIONS,
    "tuple_type": "give a list, in brackets with commas between",
    "string_type": "give text, a number in quotes",
    "too_short": "give at least one",
}
"""What to write, by the kind of pydantic's complaint, where it speaks of Python's types."""


class _Section(BaseModel):
    """Unknown keys are errors: a misspelt option must not be ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _a_number_is_a_number(cls, value: object, info: ValidationInfo) -> object:
        """YAML reads yes and no as true and false, which Python takes for 1 and 0."""
        if not _numeric(cls.model_fields[str(info.field_name)].annotation):
            return value
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, bool):
                raise ValueError(f"give a number, not {str(number).lower()}")
            if isinstance(number, int) and number > _LARGEST:
                raise ValueError(f"give a number of at most {_LARGEST}")
        return value


def _numeric(annotation: object) -> bool:
    return annotation in (int, float) or any(map(_numeric, get_args(annotation)))


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options are hashed and written down again, which dates, infinities and references to oneself do not survive."""
    try:
        json.dumps(options, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError("give finite numbers, text, true or false, and lists and mappings of these") from None
    return options


_Options = Annotated[dict[str, Any], AfterValidator(_plain)]


class EngineConfig(_Section):
    """Which engine answers the requests, and how many of them."""

    name: Literal["vllm", "hf", "planted"] = Field("vllm", description="The engine.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Number format of weights; auto: the model's."
    )
    workers: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Engines, one Ray actor each. Default: one a GPU, or one a core up to two on a CPU."
    )
    threads: Annotated[int, Field(ge=1)] | None = Field(
        None, description="CPU cores of one engine. Default: 1 beside a GPU, or the machine's cores shared evenly."
    )
    unit_tokens: int = Field(6000, ge=1, description="Tokens of one work unit; what an interruption can lose.")
    max_num_seqs: int = Field(128, ge=1, le=4096, description="Most requests in one vLLM step.")
    block_size: int = Field(
        32,
        ge=32,
        multiple_of=32,
        description="Tokens of one KV-cache block; shorter shared prefixes are computed again.",
    )
    neuron_slots: int = Field(24, ge=1, le=1024, description="Most different neuron ablations in one vLLM step.")
    eager: bool = Field(True, description="Skip compilation: slower steps, much faster start.")
    kv_cache_gib: int = Field(1, ge=1, description="KV cache of one CPU engine in GiB.")
    unit_timeout_s: float = Field(
        600,
        gt=0,
        description="Seconds without an answer to a unit after which an engine counts as hung; ten times what the unit "
        "takes at the pace so far if that is longer.",
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of a GPU's memory vLLM may take.")
    trust_remote_code: bool = Field(False, description="Let the model's repository run its own Python code.")
    planted: _Options = Field(default_factory=dict, description="Options of the planted engine.")


class PilotConfig(_Section):
    """A small look at every layer, to spare the fragile ones."""

    requests_a_layer: int = Field(2, ge=0, description="Requests a layer and task; 0 turns the pilot off.")
    heads_a_mask: int = Field(3, ge=1, description="Heads of the layer knocked out together.")


class MethodConfig(_Section):
    """How the heads are localized; a bare name stands for the method with its defaults."""

    name: Literal["sparse", "sweep", "thin_sweep", "greedy", "thompson", "attribution", "random"] = Field(
        "sparse", description="The method; sparse has the sections design and solver for its options."
    )
    options: _Options = Field(default_factory=dict, description="Its parameters; see the method's docstring.")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value


class DesignConfig(_Section):
    """Which heads go off together in which request."""

    kind: Literal["balanced", "bernoulli"] = Field("balanced", description="How masks are drawn.")
    unit: Literal["request", "block"] = Field(
        "request", description="A mask for every request, or for a block of items."
    )
    block: int = Field(8, ge=1, description="Items asked under one mask when unit is block.")
    requests: int = Field(900, ge=1, le=1_000_000, description="Masked search requests a task, the pilot's included.")
    density: float = Field(0.06, gt=0, le=0.5, description="Share of heads knocked out in a layer that is not fragile.")
    fragile_density: float = Field(0.015, gt=0, le=0.5, description="The same in a fragile layer.")
    layer_density: dict[str, Annotated[float, Field(ge=0, le=0.5)]] = Field(
        default_factory=dict,
        description="The same by layer or range of layers, such as '0-2': 0.01, whether fragile or not.",
    )
    knock_out: Literal["head", "kv_group"] = Field(
        "head", description="What is knocked out: single heads, or all query heads of a KV group together."
    )
    masks: str | None = Field(
        None,
        min_length=1,
        pattern=r"^[^\x00]*$",
        description="File of your own masks in place of drawn ones and a pilot: .npy, .npz, or JSON Lines of lists of "
        "heads; relative to the study file.",
    )
    rounds: int = Field(
        1,
        ge=1,
        le=3,
        description="1: masks only. 2: fewer, then the heads that lead alone. 3: then those still undecided again.",
    )
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="Chance of being among the first select.limit from which a head is decided."
    )
    pilot: PilotConfig = PilotConfig()

    @field_validator("layer_density", mode="before")
    @classmethod
    def _layers_are_text(cls, value: object) -> object:
        """YAML reads the key 3 as a number."""
        if not isinstance(value, dict):
            return value
        return {str(key) if type(key) is int else key: share for key, share in value.items()}

    @model_validator(mode="after")
    def _masks_and_layers_make_sense(self) -> DesignConfig:
        drawn = ("kind", "density", "fragile_density", "layer_density", "knock_out")
        # A study that is written down has every default in it, so what counts is what differs from them.
        given = [
            name
            for name in drawn
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True)
        ]
        if self.masks is not None and given:
            raise ValueError(f"masks of your own leave nothing for {given[0]} to say; give one of the two")
        self.densities  # noqa: B018  # raises
        return self

    @property
    def densities(self) -> dict[int, float]:
        """``layer_density`` by single layer."""
        found: dict[int, float] = {}
        for layers, share in self.layer_density.items():
            match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", layers)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if first > last:
                raise ValueError(f"layer_density: '{layers}' is neither a layer, such as 3, nor a range, such as 0-2")
            for layer in range(first, last + 1):
                if layer in found:
                    raise ValueError(f"layer_density gives layer {layer} twice")
                found[layer] = share
        return found

    def pilot_requests(self, layers: int) -> int:
        """Requests of the pilot for every task of a model of so many layers."""
        return 0 if self.masks is not None else layers * self.pilot.requests_a_layer


class SolverConfig(_Section):
    """From outcomes to effects."""

    name: Literal["lasso", "cvxpy", "omp", "saturating", "ridge", "marginal"] = Field(
        "lasso", description="The solver; ridge and marginal are naive references."
    )
    options: _Options = Field(default_factory=dict, description="Its parameters; see the solver's docstring.")


class SingleHeadConfig(_Section):
    """Tests of the candidates, each knocked out alone."""

    items: int = Field(12, ge=2, description="Search items of the task that each is tested on.")
    control_items: int = Field(12, ge=2, description="Search items of the controls, together, that each is tested on.")
    least_effect: float = Field(0.1, ge=0, description="Smallest mean damage of interest, in nats an item.")
    correction: Literal["bh", "holm"] = Field(
        "bh", description="For all candidates of all tasks; bh bounds the share of false ones, holm the chance of any."
    )


class SelectConfig(_Section):
    """Which heads to name, on search items alone."""

    by: Literal["tests", "knockoffs", "naming"] = Field(
        "naming",
        description="What decides which candidates are named: the naming alone, or first tests of single heads or "
        "knockoffs, which bound the error.",
    )
    error_rate: float = Field(
        0.1, gt=0, lt=1, description="Error rate of tests and knockoffs: share of false heads, or chance of any."
    )
    tests: SingleHeadConfig = SingleHeadConfig()
    resamples: int = Field(30, ge=0, le=1_000_000, description="Resamples behind selection frequencies; 0: none.")
    permutations: int = Field(
        19, ge=0, le=1_000_000, description="Shuffles of the masks behind the p-value of a fit; 0: no p-value."
    )
    candidates: int = Field(10, ge=1, description="Heads of the ranking that are tried, most specific first.")
    items: int = Field(30, ge=2, description="Search items of the task that each is tried on.")
    control_items: int = Field(25, ge=2, description="Search items of the controls, together, that each is tried on.")
    requests: int = Field(400, ge=1, description="Masked requests a task that the naming may spend.")
    limit: int = Field(5, ge=1, description="Most heads to name.")
    share: float = Field(0.9, gt=0, le=1, description="Stop when this share of the accuracy on search items is gone.")
    ratio: float = Field(3.0, ge=0, description="Damage a named head adds to its task, in multiples of the controls'.")
    bootstrap: int = Field(200, ge=1, le=1_000_000, description="Resamples behind the intervals of effects.")

    @model_validator(mode="after")
    def _limit_within_candidates(self) -> SelectConfig:
        if self.limit > self.candidates:
            raise ValueError(f"limit ({self.limit}) cannot exceed candidates ({self.candidates})")
        return self


class ConfirmConfig(_Section):
    """Held-out confirmation with the tasks' own metrics."""

    enabled: bool = Field(True, description="Run the confirmation.")
    random_draws: int = Field(19, ge=0, le=10_000, description="Draws of random heads from the same layers.")
    random_on: Literal["target", "all"] = Field("all", description="Tasks that random heads are measured on.")
    curve: int = Field(10, ge=0, description="Knockout curve up to this many heads.")
    curve_on: Literal["target", "all"] = Field("all", description="Tasks that the curve is measured on.")
    log_samples: bool = Field(
        False, description="Write the confirmation's answers as lm-eval does, into the folder lm_eval."
    )
    interactions: bool = Field(True, description="Knock out named heads and their KV neighbours in pairs.")
    interaction_items: int = Field(24, ge=6, description="Held-out items of the task that pairs are measured on.")
    bootstrap: int = Field(2000, ge=100, le=1_000_000, description="Resamples behind the intervals of drops.")

    @model_validator(mode="after")
    def _samples_need_answers(self) -> ConfirmConfig:
        if self.log_samples and not self.enabled:
            raise ValueError("log_samples writes the confirmation's answers, and enabled is false; give one of the two")
        return self


class CrosscheckConfig(_Section):
    """Heads against the FFN neurons that CNL finds."""

    enabled: bool = Field(True, description="Run the cross-check.")
    tasks: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None, description="Tasks to cross-check. Default: all of the study."
    )
    items: int = Field(24, ge=2, description="Search items that neurons are located on.")
    zeroed_items: int = Field(6, ge=1, description="Of these, items attributed again with heads zeroed.")
    steps: int = Field(19, ge=1, le=10_000, description="S, steps of the integral; S + 1 points are evaluated.")
    sigma: float = Field(6.0, gt=0, description="Keep neurons this many standard deviations above the mean.")
    random_draws: int = Field(19, ge=1, le=10_000, description="Draws of random neurons, same number in every layer.")
    random_on: Literal["target", "all"] = Field("all", description="Tasks that random neurons are measured on.")
    bootstrap: int = Field(2000, ge=100, description="Resamples behind intervals and verdict.")
    dose: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1, 2, 5, 10, 20, 50, 100), description="Neuron counts of the dose curve."
    )


class LmEvalConfig(_Section):
    """How tasks of lm-evaluation-harness are asked and graded."""

    include_path: str | None = Field(None, description="Folder of your own YAML tasks, as lm-eval's --include_path.")
    num_fewshot: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict, description="Few-shot examples by task or group. Default: the task's own number."
    )
    metric: dict[str, str] = Field(
        default_factory=dict,
        description="The metric that decides, by task or group, such as gsm8k: 'exact_match,strict-match'.",
    )
    reference: Literal["gold", "self"] = Field(
        "gold",
        description="Answer that the search scores where answers are generated: the task's own, or the one the "
        "unmodified model gives; search items it gets wrong are left out then.",
    )
    chat_template: bool = Field(False, description="Put questions as the model's chat template has it.")
    fewshot_as_multiturn: bool = Field(False, description="Examples as turns of the conversation.")
    system_instruction: str | None = Field(None, description="What the model is told first.")

    allow_code_execution: bool = Field(
        False, exclude=True, description="Set by --allow-code-execution alone: tasks may execute what the model writes."
    )

    @field_validator("allow_code_execution", mode="before")
    @classmethod
    def _no_file_allows_it(cls, value: object) -> object:
        raise ValueError("no file can allow this; give --allow-code-execution on the command line")

    @model_validator(mode="after")
    def _turns_need_a_template(self) -> LmEvalConfig:
        if self.fewshot_as_multiturn and not self.chat_template:
            raise ValueError("fewshot_as_multiturn needs chat_template: true")
        return self

    def allowing(self, code_execution: bool | None) -> LmEvalConfig:
        """The options with the word of whoever gives the command on whether what a model writes may be executed."""
        return self.model_copy(update={"allow_code_execution": bool(code_execution)})


class DataConfig(_Section):
    """Where a task of the user's own comes from."""

    file: str = Field(
        min_length=1,
        pattern=r"^[^\x00]*$",
        description="JSON Lines with 'prompt' and 'answer', or a Python file with a function marked @questions; "
        "relative to the study file.",
    )
    template: str = Field("{text}", description="How a prompt is put, with {text} in its place; the answer follows.")
    shots: int = Field(0, ge=0, description="First questions of the file, shown solved before each and not asked.")
    relatives: tuple[str, ...] = Field((), description="Tasks so close to it that they must not act as its control.")


_TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class StudyConfig(_Section):
    """One study: a model, its capabilities, and how they are localized."""

    model: str = Field(min_length=1, description="A directory, a hub id or a built-in model name.")
    tasks: tuple[str, ...] = Field(min_length=1, description="Capabilities to localize; each controls the others.")
    controls: tuple[str, ...] = Field((), description="Tasks that are only measured, at confirmation.")
    data: dict[str, DataConfig] = Field(
        default_factory=dict, description="Tasks of your own by name: a file, or 'file' and options."
    )
    search_items: int | None = Field(None, ge=1, description="Search items a task. Default: half of its items.")
    held_out_items: int | None = Field(None, ge=1, description="Held-out items a task. Default: the other half.")
    seed: int = Field(0, ge=0, description="Seed of splits, masks and resamples.")
    ledger: str | None = Field(
        None,
        pattern=r"^[^\x00]*$",
        description="Folder of measured outcomes shared by studies. Default: the study's own.",
    )
    lm_eval: LmEvalConfig = LmEvalConfig()
    engine: EngineConfig = EngineConfig()
    method: MethodConfig = MethodConfig()
    design: DesignConfig = DesignConfig()
    solver: SolverConfig = SolverConfig()
    select: SelectConfig = SelectConfig()
    confirm: ConfirmConfig = ConfirmConfig()
    crosscheck: CrosscheckConfig = CrosscheckConfig()

    @field_validator("data", mode="before")
    @classmethod
    def _files_by_name(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        for name in value:
            if not isinstance(name, str) or not _TASK_NAME.fullmatch(name):
                raise ValueError(f"{name!r} does not do as a name; take letters, digits, '.', '_' and '-'")
        return {name: {"file": given} if isinstance(given, str) else given for name, given in value.items()}

    @field_validator("tasks", "controls")
    @classmethod
    def _no_duplicates(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"{', '.join(repeated)} is listed twice")
        return names

    @model_validator(mode="after")
    def _tasks_and_controls_apart(self) -> StudyConfig:
        both = sorted(set(self.tasks) & set(self.controls))
        if both:
            raise ValueError(
                f"{', '.join(both)} is both in tasks and in controls; a task of the study is a control already"
            )
        if self.select.by == "knockoffs" and self.method.name != "sparse":
            raise ValueError("knockoffs need the masks of the method sparse; name it, or set select.by to tests")
        drawn = (self.design.kind, self.design.unit, self.design.knock_out, self.design.masks)
        if self.select.by == "knockoffs" and drawn != ("bernoulli", "request", "head", None):
            raise ValueError(
                "knockoffs need masks of heads drawn independently for every request; set design.kind to bernoulli, "
                "design.unit to request and design.knock_out to head, or select.by to tests"
            )
        if self.crosscheck.enabled and not (self.confirm.enabled and self.confirm.random_draws):
            raise ValueError("the cross-check needs the confirmation with random draws; set crosscheck.enabled: false")
        if self.design.rounds > 1 and (self.design.knock_out != "head" or self.design.masks is not None):
            raise ValueError(
                "rounds after the masks knock out single heads and need masks drawn over them; set design.rounds to 1, "
                "or leave out design.knock_out and design.masks"
            )
        unknown = sorted(set(self.crosscheck.tasks or ()) - set(self.tasks))
        if unknown:
            raise ValueError(f"crosscheck.tasks names {', '.join(unknown)}, which is not in tasks")
        if len(set(self.crosscheck.tasks or ())) < len(self.crosscheck.tasks or ()):
            raise ValueError("crosscheck.tasks names a task twice")
        return self

    def allowing(self, code_execution: bool | None) -> StudyConfig:
        """The study with the word of whoever gives the command on whether what a model writes may be executed."""
        return self.model_copy(update={"lm_eval": self.lm_eval.allowing(code_execution)})

    def located(self, folder: Path) -> StudyConfig:
        """The study with the files of its own tasks and masks as absolute paths; relative ones are in the folder."""
        at = {
            name: data.model_copy(update={"file": os.path.abspath(folder / data.file)})
            for name, data in self.data.items()
        }
        design = self.design
        if design.masks is not None:
            design = design.model_copy(update={"masks": os.path.abspath(folder / design.masks)})
        return self.model_copy(update={"data": at, "design": design})


def parse_study(data: object, source: str = "study") -> StudyConfig:
    """Validates a study.

    Args:
        data: what the YAML holds.
        source: what to call it in messages.

    Raises:
        UsageError: one line naming the first thing that is wrong.
    """
    if not isinstance(data, dict):
        raise UsageError(f"{source}: expected 'key: value' lines such as 'model: smollm2-135m-instruct'")
    try:
        return StudyConfig.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{source}: {first_problem(error)}") from None


def load_study(path: Path, overrides: tuple[str, ...] = ()) -> StudyConfig:
    """Reads a study file and applies ``a.b=c`` overrides, whose values are read as YAML.

    Raises:
        UsageError: if the file is missing, is not YAML or does not describe a study.
    """
    return parse_study(read_options(path, overrides), str(path)).located(path.parent)


def dump_study(study: StudyConfig) -> str:
    """The study as YAML, every default written out."""
    return dump_options(study.model_dump(mode="json"))


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong with some options, in one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown option '{where}'{more}"
    if first["type"] == "missing":
        return f"'{where}' is required{more}"
    if first["loc"][-1:] == ("[key]",):
        section = ".".join(str(part) for part in first["loc"][:-2])
        return f"'{section}': write the name {first['input']!r} in quotes{more}"
    message = _EXPECTED.get(first["type"], first["msg"].removeprefix("Value error, "))
    return f"'{where}': {message}{more}" if where else f"{message}{more}"
