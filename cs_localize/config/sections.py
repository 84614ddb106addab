"""The sections of a study file: what a user can choose of each part."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

_LARGEST = 2**63 - 1
"""Of every whole number: what an array can hold."""


class Section(BaseModel):
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


class EngineConfig(Section):
    """Which engine answers the requests, and how many of them."""

    name: Literal["vllm", "hf", "planted"] = Field("vllm", description="The engine.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="Number format of weights; auto: the model's, or float32 on a CPU without bfloat16 instructions.",
    )
    workers: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Engines, one Ray actor each. Default: one a GPU, or one a core up to two on a CPU."
    )
    threads: Annotated[int, Field(ge=1)] | None = Field(
        None, description="CPU cores of one engine. Default: 1 beside a GPU, or the machine's cores shared evenly."
    )
    unit_tokens: int = Field(6000, ge=1, description="Tokens of one work unit; what an interruption can lose.")
    max_num_seqs: int = Field(128, ge=1, le=4096, description="Most requests in one vLLM step.")
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Most tokens in one vLLM step; longer prompts are cut. Default: vLLM's own."
    )
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
    tensor_parallel: int = Field(
        1, ge=1, description="Ranks that each vLLM engine is split over, a GPU each, or cores of their own on a CPU."
    )
    model_impl: Literal["auto", "vllm", "transformers"] = Field(
        "auto", description="Whose code of the architecture vLLM runs; auto: its own where it has one."
    )
    trust_remote_code: bool = Field(False, description="Let the model's repository run its own Python code.")
    planted: _Options = Field(default_factory=dict, description="Options of the planted engine.")


class PilotConfig(Section):
    """A small look at every layer, to spare the fragile ones."""

    requests_a_layer: int = Field(2, ge=0, description="Requests a layer and task; 0 turns the pilot off.")
    heads_a_mask: int = Field(3, ge=1, description="Heads of the layer knocked out together.")


class MethodConfig(Section):
    """How the heads are localized; a bare name stands for the method with its defaults."""

    name: Literal["sparse", "sweep", "thin_sweep", "greedy", "stepwise", "thompson", "attribution", "random"] = Field(
        "sparse", description="The method; sparse has the sections design and solver for its options."
    )
    options: _Options = Field(default_factory=dict, description="Its parameters; see the method's docstring.")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value


class DesignConfig(Section):
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
        drawn = ("kind", "density", "fragile_density", "layer_density", "knock_out", "pilot")
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


class SolverConfig(Section):
    """From outcomes to effects."""

    name: Literal["lasso", "cvxpy", "omp", "saturating", "ridge", "marginal"] = Field(
        "lasso", description="The solver; ridge and marginal are naive references."
    )
    options: _Options = Field(default_factory=dict, description="Its parameters; see the solver's docstring.")


class SingleHeadConfig(Section):
    """Tests of the candidates, each knocked out alone."""

    items: int = Field(12, ge=2, description="Search items of the task that each is tested on.")
    control_items: int = Field(12, ge=2, description="Search items of the controls, together, that each is tested on.")
    least_effect: float = Field(0.1, ge=0, description="Smallest mean damage of interest, in nats an item.")
    correction: Literal["bh", "holm"] = Field(
        "bh", description="For all candidates of all tasks; bh bounds the share of false ones, holm the chance of any."
    )


class SelectConfig(Section):
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
    resamples: int = Field(
        30, ge=0, le=1_000_000, description="Resamples behind the sparse method's selection frequencies; 0: none."
    )
    permutations: int = Field(
        19,
        ge=0,
        le=1_000_000,
        description="Shuffles of the masks behind the p-value of the sparse method's fit; 0: no p-value.",
    )
    candidates: int = Field(10, ge=1, description="Heads of the ranking that are tried, most specific first.")
    items: int = Field(30, ge=2, description="Search items of the task that each is tried on.")
    control_items: int = Field(25, ge=2, description="Search items of the controls, together, that each is tried on.")
    requests: int = Field(400, ge=1, description="Masked requests a task that the naming may spend.")
    limit: int = Field(5, ge=1, description="Most heads to name.")
    share: float = Field(0.9, gt=0, le=1, description="Stop when this share of the accuracy on search items is gone.")
    ratio: float = Field(3.0, ge=0, description="Damage a named head adds to its task, in multiples of the controls'.")
    bootstrap: int = Field(
        200, ge=1, le=1_000_000, description="Resamples behind the intervals of the sparse method's effects."
    )

    @model_validator(mode="after")
    def _limit_within_candidates(self) -> SelectConfig:
        if self.limit > self.candidates:
            raise ValueError(f"limit ({self.limit}) cannot exceed candidates ({self.candidates})")
        return self

    @property
    def reserved(self) -> int:
        """First search items of every task that tests of single heads keep to themselves."""
        return max(self.tests.items, self.tests.control_items) if self.by == "tests" else 0


class ConfirmConfig(Section):
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


class CrosscheckConfig(Section):
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


class LmEvalConfig(Section):
    """How tasks of lm-evaluation-harness are asked and graded."""

    include_path: str | None = Field(
        None,
        min_length=1,
        pattern=r"^[^\x00]*$",
        description="Folder of your own YAML tasks, as lm-eval's --include_path; relative to the study file.",
    )
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
    grades: bool = Field(
        True, exclude=True, description="Set by a plan alone, to false: no answer is graded, so nothing is executed."
    )

    @field_validator("allow_code_execution", mode="before")
    @classmethod
    def _no_file_allows_it(cls, value: object) -> object:
        raise ValueError("no file can allow this; give --allow-code-execution on the command line")

    @field_validator("grades", mode="before")
    @classmethod
    def _no_file_sets_it(cls, value: object) -> object:
        raise ValueError("a plan alone sets this; leave it out")

    @model_validator(mode="after")
    def _turns_need_a_template(self) -> LmEvalConfig:
        if self.fewshot_as_multiturn and not self.chat_template:
            raise ValueError("fewshot_as_multiturn needs chat_template: true")
        return self

    def allowing(self, code_execution: bool | None) -> LmEvalConfig:
        """The options with the word of whoever gives the command on whether what a model writes may be executed."""
        return self.model_copy(update={"allow_code_execution": bool(code_execution)})

    def ungraded(self) -> LmEvalConfig:
        """The options for whoever only reads the questions, and executes nothing."""
        return self.model_copy(update={"grades": False})


class DataConfig(Section):
    """Where a task of the user's own comes from."""

    file: str = Field(
        min_length=1,
        pattern=r"^[^\x00]*$",
        description="JSON Lines with 'prompt', 'answer' and, for multiple choice, 'choices', or a Python file with a "
        "function marked @questions; relative to the study file.",
    )
    template: str = Field("{text}", description="How a prompt is put, with {text} in its place; the answer follows.")
    shots: int = Field(0, ge=0, description="First questions of the file, shown solved before each and not asked.")
    relatives: tuple[str, ...] = Field((), description="Tasks so close to it that they must not act as its control.")
