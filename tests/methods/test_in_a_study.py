"""Every method in a study on the planted engine, as the cells of one grid."""

from __future__ import annotations

from pathlib import Path

import pytest

from cs_localize.config import load_study, parse_study
from cs_localize.errors import UsageError
from cs_localize.findings import HeadsFile
from cs_localize.folder import StudyResult, load_result
from cs_localize.grid import parse_grid, run_grid
from cs_localize.measure.planted import PlantedEngine
from cs_localize.session import engine_spec
from cs_localize.study import check_study, run_study
from tests.studies import planted, repeated_keys

pytestmark = pytest.mark.ray

TASKS = ("antonyms", "capitals")
SHAPE = {"layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 16}
ITEMS, N_HEADS = 8, 24
OPTIONS: dict[str, object] = {
    "sparse": "sparse",
    "sweep": {"name": "sweep"},
    "thin_sweep": "thin_sweep",
    "greedy": {"name": "greedy", "options": {"heads": 2}},
    "stepwise": {"name": "stepwise", "options": {"requests": 172, "heads": 3}},
    "thompson": {"name": "thompson", "options": {"requests": 90}},
    "random": "random",
}
MASKED = {
    "sparse": 100,
    "sweep": ITEMS * N_HEADS,
    "thin_sweep": 2 * N_HEADS,
    "greedy": ITEMS * (2 * N_HEADS - 1),
    "stepwise": 170,
    "thompson": 90,
    "random": 0,
}
"""Requests a task before the naming."""

every = pytest.mark.parametrize("name", list(OPTIONS))


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StudyResult]:
    base = planted(
        search_items=ITEMS,
        held_out_items=ITEMS,
        design={"requests": 100, "density": 0.25},
        confirm={"enabled": False},
        select={"requests": 1},
    )
    base["engine"] |= {"workers": 1, "planted": {"shape": SHAPE, "n_specific": 2, "n_universal": 1}}
    del base["model"], base["tasks"]
    out = tmp_path_factory.mktemp("grid")
    grid = {
        "base": base,
        "models": {"planted": {"model": "planted"}},
        "task_sets": {"pair": list(TASKS)},
        "methods": {name: {"method": method} for name, method in OPTIONS.items()},
    }
    result = run_grid(parse_grid(grid, out), out)
    assert not result.failed, result.summary_lines()
    return {cell.cell.method: load_result(cell.folder) for cell in result.cells}


def heads_of(studies: dict[str, StudyResult], name: str) -> HeadsFile:
    return studies[name].heads


@every
def test_heads_json_says_the_method_and_ranks_every_head(studies: dict[str, StudyResult], name: str) -> None:
    heads = heads_of(studies, name)
    assert heads.method == name
    assert list(heads.tasks) == list(TASKS)
    for finding in heads.tasks.values():
        assert len({entry.head for entry in finding.ranking}) == N_HEADS


@every
def test_what_only_a_fit_to_masks_can_tell_is_there_for_the_sparse_method_alone(
    studies: dict[str, StudyResult], name: str
) -> None:
    sparse, heads = name == "sparse", heads_of(studies, name)
    assert (heads.solver is not None) == sparse
    assert (studies[name].out / "design.npz").exists() == sparse
    for finding in heads.tasks.values():
        assert (finding.fit is not None) == sparse
        assert (finding.tests_a_head is not None) == sparse
        assert (finding.ranking[0].interval is not None) == sparse
        assert (finding.ranking[0].effect is not None) == (name != "random")
        assert (finding.baseline_accuracy is not None) == (name != "random")


@every
def test_the_requests_of_a_method_that_leaves_none_for_naming_are_its_own(
    studies: dict[str, StudyResult], name: str
) -> None:
    assert {finding.requests for finding in heads_of(studies, name).tasks.values()} == {MASKED[name]}


@every
def test_the_page_tells_where_the_effects_come_from(studies: dict[str, StudyResult], name: str) -> None:
    page = studies[name].report.read_text(encoding="utf-8")
    told = {"sparse": "lasso solver", "stepwise": "on top of those before", "random": "random order"}.get(
        name, "with the head alone zeroed"
    )
    assert told in page
    assert ("capped at" in page) == (name != "random")


@pytest.mark.parametrize("name", ["sweep", "greedy"])
def test_the_head_that_was_planted_strongest_comes_first(studies: dict[str, StudyResult], name: str) -> None:
    config = load_study(studies[name].out / "study.yaml")
    engine = PlantedEngine.from_spec(engine_spec(config.model, config.engine, TASKS)[0])
    for task, finding in heads_of(studies, name).tasks.items():
        assert finding.ranking[0].head == str(next(iter(engine.truth(task))))


def test_the_methods_of_a_grid_share_the_ledger(studies: dict[str, StudyResult]) -> None:
    assert repeated_keys(studies["sweep"].out.parent.parent / "ledger") == 0


def test_attribution_is_refused_for_the_planted_engine() -> None:
    with pytest.raises(UsageError, match="the planted engine has no gradients for the method attribution"):
        check_study(parse_study(planted(method="attribution", design={}, select={})))


@pytest.mark.model
@pytest.mark.full
def test_attribution_ranks_the_heads_of_a_real_model_in_a_study(tmp_path: Path) -> None:
    study = planted(
        model="smollm2-135m-instruct",
        tasks=list(TASKS),
        search_items=6,
        method="attribution",
        design={},
        engine={"name": "hf", "workers": 1},
        select={"requests": 1},
        confirm={"enabled": False},
    )
    heads = run_study(parse_study(study), tmp_path).heads
    for finding in heads.tasks.values():
        effects = [entry.effect for entry in finding.ranking]
        assert finding.requests == 3 * 6
        assert len(effects) == 270
        assert None not in effects
        assert len(set(effects)) == 270
    assert "First-order estimate" in (tmp_path / "report.html").read_text(encoding="utf-8")
