"""What a study writes: heads.json, confirm.json, crosscheck.json. Also the schema a service would speak."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cs_localize import __version__
from cs_localize.errors import CsLocalizeError

Interval = tuple[float, float]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Provenance(_File):
    """Where a finding comes from."""

    version: str = Field(description="Version of cs_localize.")
    command: str = Field(description="The command that makes this study again.")
    engine: str = Field(description="Fingerprint of the engine: model content, dtype, engine and version, settings.")
    model_fingerprint: str = Field(description="Hash of the model's files.")
    seed: int = Field(description="Seed of splits, masks and resamples.")
    packages: dict[str, str] = Field(description="Versions of the packages the measurement depends on.")
    data: dict[str, str] = Field(
        {}, description="Hashes of what is the user's own: by name of a task its questions and format; design.masks."
    )

    def current(self, engine: str, data: dict[str, str]) -> bool:
        """Whether this version of the package found it, with the engine of that fingerprint and those own tasks."""
        return self.version == __version__ and (self.engine, self.data) == (engine, data)


class RankedHead(_File):
    """One head in the ranking of a task."""

    head: str = Field(description="The head, such as L16H21.")
    effect: float | None = Field(
        None,
        description="Score lost when it is knocked out, in nats a request: the mean of what it did alone, where rounds "
        "after the masks tried that; refitted by least squares for other candidates; the solver's shrunk estimate for "
        "the rest; of other methods than sparse, their estimate, or null.",
    )
    interval: Interval | None = Field(
        None,
        description="95% interval: Student's where the effect is that of the head alone, bootstrap where it is "
        "refitted; null below the candidates and for other methods.",
    )
    specificity: float | None = Field(
        None,
        description="Effect in spreads of this task, minus that of the control it hurts most; null without effects.",
    )
    specificity_mean: float | None = Field(None, description="The same against the mean of the controls.")
    strongest_control: str | None = Field(None, description="The control it hurts most; null where a task has none.")
    frequency: float | None = Field(
        None,
        description="Share of resamples of items and masks that select it, or its KV group where whole ones were "
        "knocked out; null if there were none.",
    )
    p: float | None = Field(
        None,
        description="P-value of the test that it costs the task the least effect alone, and more than the controls; "
        "null if it was not tested.",
    )
    q: float | None = Field(None, description="The same, adjusted for all candidates of all tasks; null if untested.")


class TaskFinding(_File):
    """The heads of one task."""

    named: list[str] = Field(
        description="Heads the task depends on, most specific first; empty if none could be shown."
    )
    reason: str = Field(description="Why these heads are named and no others.")
    ranking: list[RankedHead] = Field(description="All heads, most specific first.")
    search_curve: list[float] = Field(
        description="Accuracy on search items with the first k named heads zeroed, k = 0, 1, …."
    )
    baseline_score: float | None = Field(
        description="Mean log-probability of the reference answer on the search items that the method asked unablated; "
        "null if it asked none."
    )
    baseline_accuracy: float | None = Field(description="Share of these with every answer token ranked first.")
    items: int = Field(description="Search items.")
    tests_a_head: float | None = Field(
        description="Smallest number of different masks that knock out a head; null for methods without masks."
    )
    overlap: float | None = Field(
        None, description="Heads that two different masks have in common, on average; null for methods without masks."
    )
    coherence: float | None = Field(
        None,
        description="Largest absolute correlation of two heads over the masked requests, 0 to 1: two at 1 cannot be "
        "told apart; null for methods without masks.",
    )
    requests: int = Field(description="Masked search requests spent on this task: design, tests and naming.")
    baseline_requests: int = Field(description="Unablated requests on search items.")
    tokens: int = Field(description="Tokens of all search requests of this task.")
    fit: float | None = Field(
        description="Correlation of predicted and measured damage on held-back masks; null for methods without masks."
    )
    fit_p: float | None = Field(
        None, description="P-value of that correlation against shuffled masks; null if there were no permutations."
    )


class Scoring(_File):
    """What the search read of a task and what confirms it, side by side on a sample of search items."""

    score: str = Field(description="The continuous score that the search reads.")
    metric: str = Field(description="The metric that decides which heads are named, and confirms them.")
    sequences: float = Field(description="Sequences scored for one search request: 1, or the mean number of choices.")
    correlation: float | None = Field(
        description="Spearman's rank correlation of the two, over items unablated and with the named heads zeroed; "
        "null where one of them is the same throughout."
    )
    sample: int = Field(description="Pairs of score and metric behind it.")


class HeadsFile(_File):
    """heads.json: the finding of a study, every task."""

    schema_: Literal[1] = Field(1, alias="schema", description="Version of this file's layout.")
    model: str = Field(description="The model as the study named it.")
    layers: int = Field(description="Decoder layers.")
    heads: int = Field(description="Query heads a layer.")
    kv_heads: int = Field(description="Key/value heads a layer.")
    method: str = Field("sparse", description="How the heads were ranked.")
    solver: str | None = Field(description="The solver; null for other methods than sparse.")
    knock_out: Literal["head", "kv_group"] = Field(
        "head", description="What the masks of the method sparse knocked out: single heads, or whole KV groups."
    )
    selected_by: Literal["tests", "knockoffs", "naming"] = Field(
        "naming", description="What decided which candidates the naming could try; naming: nothing did."
    )
    error_rate: float | None = Field(None, description="Error rate of tests or knockoffs; null where there were none.")
    tasks: dict[str, TaskFinding] = Field(description="Findings by task.")
    universal: list[str] = Field(
        description="Heads that hurt nearly every capability, worst first; named only where one stands out."
    )
    fragile_layers: list[int] = Field(description="Layers in which the pilot made the design knock out fewer heads.")
    sweep_requests: int = Field(description="Requests a sweep of every head on the same items would cost a task.")
    scoring: dict[str, Scoring] = Field(
        default_factory=dict, description="Score and metric by task; empty in files of earlier versions."
    )
    left_out: dict[str, dict[str, str]] = Field(
        default_factory=dict,
        description="By task or control, questions that were drawn and not asked, with the reason.",
    )
    warnings: list[str] = Field(description="What a reader should know before trusting this.")
    provenance: Provenance = Field(description="Where this comes from.")

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Drop(_File):
    """Accuracy lost by a task under one ablation, on held-out items."""

    accuracy: float = Field(description="Accuracy under the ablation, 0 to 1.")
    drop: float = Field(description="Baseline accuracy minus accuracy.")
    ci: Interval = Field(description="95% paired bootstrap interval of the drop.")
    p: float = Field(description="Exact McNemar p-value, two-sided.")
    p_holm: float = Field(description="The same, Holm-corrected over the matrix.")


class RandomHeads(_File):
    """Random heads of the same layers, without the named ones."""

    mean_drop: float = Field(description="Mean drop of the target over the draws.")
    draws: list[float] = Field(description="Drop of the target in every draw.")
    heads: list[list[str]] = Field(description="The heads of every draw.")
    controls: list[float] = Field(description="Mean drop of the controls in every draw; empty if not measured.")


class CountShare(_File):
    """What is left of a count under one ablation."""

    count: int = Field(description="Counted in all answers under the ablation.")
    share: float = Field(description="The same as a share of what is counted without an ablation.")
    ci: Interval = Field(description="95% paired bootstrap interval of the share.")


class TaskCounts(_File):
    """A task whose metric counts what it looks for in an answer, such as profanities."""

    baseline: int = Field(description="Counted in all held-out answers of the unmodified model.")
    without: dict[str, CountShare] = Field(description="By task whose heads are zeroed.")
    random: list[float] = Field(description="Share left in every draw of random heads; empty if none were drawn.")


PairKind = Literal["backup", "redundant", "additive", "saturated"]


class HeadPair(_File):
    """Two heads knocked out together: their damage less that of each alone, 0 where damages add up."""

    heads: tuple[str, str] = Field(description="The two heads, a named one first.")
    kind: PairKind = Field(
        description="backup: together they do more than the sum; redundant: less; additive: neither was shown; "
        "saturated: too few items have room for both damages to tell."
    )
    items: int = Field(
        description="Items with room for both damages; where these are too few, all are behind the rest."
    )
    nats: float = Field(description="Interaction in log-probability of the reference answer, mean over items.")
    nats_ci: Interval = Field(description="95% paired bootstrap interval of the same.")
    log_odds: float = Field(description="Interaction in log-odds of the reference answer.")
    log_odds_ci: Interval = Field(description="95% paired bootstrap interval of the same.")
    accuracy: float = Field(description="Interaction in the share of items with every answer token ranked first.")
    accuracy_ci: Interval = Field(description="95% paired bootstrap interval of the same.")
    p: float = Field(description="Wilcoxon's signed-rank test of the interaction in nats, two-sided.")
    p_holm: float = Field(description="The same, Holm-corrected over all pairs of the study.")


class Interactions(_File):
    """Pairs of named heads, and of named heads and the other query heads of their KV groups, on held-out items."""

    tasks: dict[str, list[HeadPair]] = Field(description="Pairs by task; tasks without any are left out.")
    items: dict[str, int] = Field(description="Held-out items asked, by task.")
    requests: int = Field(description="Requests of the pairs, single heads and baseline included.")
    tokens: int = Field(description="Their tokens.")


class ConfirmFile(_File):
    """confirm.json: does it hold on items the search never saw, with the task's own metric?"""

    schema_: Literal[1] = Field(1, alias="schema", description="Version of this file's layout.")
    items: dict[str, int] = Field(description="Held-out items by task.")
    baseline: dict[str, float] = Field(description="Accuracy of the unmodified model by task.")
    baseline_ci: dict[str, Interval] = Field(description="95% Wilson interval of the baseline.")
    matrix: dict[str, dict[str, Drop]] = Field(description="By task whose heads are zeroed, then by task measured.")
    universal: dict[str, Drop] = Field(
        description="Every task with the universal heads zeroed; empty if there are none."
    )
    contrast: dict[str, tuple[float, float, float]] = Field(
        description="By task: drop of the target minus mean drop of its controls, with its 95% interval."
    )
    random: dict[str, RandomHeads] = Field(description="Random heads by task.")
    curve: dict[str, list[float]] = Field(
        description="Accuracy with the first k heads zeroed, named ones first, k = 0, 1, …."
    )
    control_curve: dict[str, list[float]] = Field(
        description="Mean accuracy of the controls under the same ablations; empty if not measured."
    )
    interactions: Interactions | None = Field(None, description="Heads in pairs; null where they were not measured.")
    counts: dict[str, TaskCounts] = Field(
        default_factory=dict,
        description="By task whose metric counts; an answer in which it finds something is right in all other fields. "
        "Tasks of which the unmodified model's answers have nothing are left out.",
    )
    noise: float = Field(description="Share of graded answers that differ between two unablated runs.")
    requests: int = Field(description="Requests of the confirmation, without those of the pairs.")
    tokens: int = Field(description="Their tokens.")

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class OverlapMeasure(_File):
    """Agreement of the neuron sets of two disjoint halves of the items."""

    max: float = Field(description="|A and B| / max(|A|, |B|).")
    min: float = Field(description="|A and B| / min(|A|, |B|).")
    iou: float = Field(description="|A and B| / |A or B|.")
    chance: float = Field(description="Expected |A and B| / max(|A|, |B|) of random sets of these sizes.")


class NeuronSet(_File):
    """The neurons CNL locates for a task."""

    count: int = Field(description="Neurons located.")
    ratio: float = Field(description="Share of all FFN neurons.")
    rule: str = Field(description="How they were kept.")
    neurons: list[str] = Field(description="The neurons, highest attribution first.")
    items: int = Field(description="Items they were located on.")
    completeness: float = Field(
        description="Correlation of a layer's attribution sum with p(w) - p(0), over layers and tokens."
    )
    overlap: OverlapMeasure = Field(description="Agreement of two disjoint halves of the items.")
    knowledge_neurons: OverlapMeasure = Field(description="The same for KN sets of single items: mean over pairs.")
    attribution_with_heads_zeroed: float = Field(
        description="Summed attribution of these neurons with the named heads zeroed, as a share of the unmodified."
    )
    random_attribution_with_heads_zeroed: float = Field(
        description="The same with random heads of the same layers zeroed."
    )


class ConditionDrop(_File):
    """One task under one condition of the cross-check."""

    accuracy: float = Field(description="Accuracy, 0 to 1; mean over draws for random neurons.")
    drop: float = Field(description="Baseline accuracy minus accuracy.")
    ci: Interval = Field(description="95% interval of the drop: paired bootstrap, over draws for random neurons.")


class ImpactOnPerformance(_File):
    """IPP: accuracy under the ablation minus the best accuracy over the random draws; more negative is stronger."""

    heads: float = Field(description="For the named heads, against random heads.")
    neurons: float = Field(description="For the located neurons, against random neurons.")


class DosePoint(_File):
    """One point of the dose curve."""

    neurons: int = Field(description="Neurons zeroed, highest attribution first.")
    target: float = Field(description="Accuracy of the target.")
    controls: float = Field(description="Mean accuracy of the controls.")


class TaskCrosscheck(_File):
    """Heads against neurons for one task."""

    neurons: NeuronSet = Field(description="The located neurons.")
    conditions: dict[str, dict[str, ConditionDrop]] = Field(
        description="By condition (heads, neurons, both, random_neurons), then by task measured."
    )
    ipp: ImpactOnPerformance = Field(description="Impact on performance on the target.")
    dose: list[DosePoint] = Field(description="Damage against the number of neurons.")
    verdict: str = Field(description="The comparison in one sentence.")


class CrosscheckFile(_File):
    """crosscheck.json: the named heads against the neurons CNL locates for the same task."""

    schema_: Literal[1] = Field(1, alias="schema", description="Version of this file's layout.")
    tasks: dict[str, TaskCrosscheck] = Field(description="By task.")
    requests: int = Field(description="Requests of the cross-check.")
    tokens: int = Field(description="Their tokens.")

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


FileT = TypeVar("FileT", HeadsFile, ConfirmFile, CrosscheckFile, NeuronSet)


def dump_file(value: BaseModel) -> str:
    """The canonical text: equal findings are equal byte for byte. Floats keep six significant digits."""
    data = _rounded(value.model_dump(mode="json", by_alias=True))
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_file(path: Path, value: FileT) -> FileT:
    """Writes atomically: a reader sees the old file or the new one.

    Returns:
        The value as a reader will see it, its floats rounded.
    """
    text = dump_file(value)
    write_text(path, text)
    return type(value).model_validate_json(text)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Where to write a file that takes its name only once it is whole: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # readable by whom the user's umask lets
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file as ``new_file`` does."""
    try:
        with new_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        error.filename = error.filename or str(path)  # a write that fails names none
        raise


def read_file(path: Path, kind: type[FileT]) -> FileT:
    """Reads one of the files.

    Raises:
        CsLocalizeError: if it is missing, unreadable or of another schema version.
    """
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CsLocalizeError(f"{path} does not exist; run the study first") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CsLocalizeError(f"cannot read {path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        problem = ": ".join(filter(None, (".".join(str(part) for part in first["loc"]), first["msg"])))
        raise CsLocalizeError(f"{path} is not a valid {kind.__name__}: {problem}") from None


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}") + 0.0  # -0.0 and 0.0 print alike
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return value
