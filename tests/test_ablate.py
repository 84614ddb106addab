from __future__ import annotations

from pathlib import Path

import pytest

from cs_localize.ablate import KINDS, AblationGrid, StudyHeads, held_out
from cs_localize.ablate.items import mean_items
from cs_localize.cli import main
from cs_localize.config import parse_study
from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, Head, ModelShape
from cs_localize.spelling import check_spelling, read_heads, spell_out
from cs_localize.tasks import get_task
from tests.tasks.harness.builders import write_sum_task

SHAPE = ModelShape(layers=4, heads=6, kv_heads=3, head_dim=8, ffn=32)


def parts(kind: str, heads: str = "L1H2,L1H3,L2H0") -> dict[str, str]:
    conditions = AblationGrid({"mine": heads}, kinds=(kind,)).conditions(SHAPE)
    assert {condition.kind for condition in conditions} == {kind}
    return {condition.part: ",".join(map(str, condition.heads)) for condition in conditions}


def test_a_kv_group_and_a_layer_are_spelled_out_as_their_heads_with_their_factors() -> None:
    assert spell_out("L1G1=mean", SHAPE) == "L1H2=mean,L1H3=mean"
    assert spell_out("L1G1,L0H3=0.5,L2N7", SHAPE) == "L1H2,L1H3,L0H3=0.5,L2N7"
    assert Ablation.decode(spell_out("L3=2", SHAPE)).heads == tuple((Head(3, h), 2.0) for h in range(6))


def test_means_are_of_search_items_of_every_task_and_of_no_held_out_one() -> None:
    items = mean_items(["antonyms", "capitals", "antonyms"], seed=3)
    assert [item.task for item in items] == ["antonyms"] * 32 + ["capitals"] * 32
    asked = {item.id for item in held_out(["antonyms"], seed=3)["antonyms"]}
    assert not asked & {item.id for item in items}


def test_heads_keep_the_order_they_are_typed_in() -> None:
    assert read_heads("L2H1, L0G0", SHAPE) == (Head(2, 1), Head(0, 0), Head(0, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one head"),
        ("L4Q2", "not a head"),
        ("L4=x", "must be a number"),
        ("L4G1=inf", "'L4G1=inf': .* must be finite"),
        ("L0H0,L0H0", "twice"),
    ],
)
def test_heads_that_no_model_has_are_refused_before_one_is_loaded(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_spelling(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [("L9H0", "out of range"), ("L0G3", "KV groups 0..2"), ("L4", "out of range"), ("L0H0,L0G0", "twice")],
)
def test_heads_that_this_model_lacks_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_heads(text, SHAPE)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("together", {"": "L1H2,L1H3,L2H0"}),
        ("single", {"L1H2": "L1H2", "L1H3": "L1H3", "L2H0": "L2H0"}),
        ("cumulative", {"1": "L1H2", "2": "L1H2,L1H3", "3": "L1H2,L1H3,L2H0"}),
        ("leave-one-out", {"L1H2": "L1H3,L2H0", "L1H3": "L1H2,L2H0", "L2H0": "L1H2,L1H3"}),
        ("kv-groups", {"L1G1": "L1H2,L1H3", "L2G0": "L2H0,L2H1"}),
        (
            "layers",
            {"L1": "L1H0,L1H1,L1H2,L1H3,L1H4,L1H5", "L2": "L2H0,L2H1,L2H2,L2H3,L2H4,L2H5"},
        ),
    ],
)
def test_every_kind_of_head_sets_is_made_as_documented(kind: str, expected: dict[str, str]) -> None:
    assert parts(kind) == expected


def test_every_head_set_comes_at_every_scale_and_the_ablation_says_so() -> None:
    conditions = AblationGrid({"a": "L1H2", "b": "L0H0"}, kinds=KINDS, scales=(0, 0.5, 2)).conditions(SHAPE)

    assert len(conditions) == 2 * 5 * 3, "a list of one head has nothing to leave out"
    assert {condition.scale for condition in conditions} == {0.0, 0.5, 2.0}
    assert conditions[1].ablation == Ablation.decode("L1H2=0.5")


def test_random_controls_are_as_many_heads_of_the_same_layers_and_depend_on_the_seed_alone() -> None:
    grid = AblationGrid({"mine": "L1H2,L1H3,L2H0"}, kinds=(), draws=20, seed=3)
    drawn = [condition.heads for condition in grid.conditions(SHAPE)]

    for heads in drawn:
        assert [head.layer for head in heads] == [1, 1, 2]
        assert not {Head(1, 2), Head(1, 3), Head(2, 0)} & set(heads)
    assert len(set(drawn)) > 5
    assert [condition.heads for condition in grid.conditions(SHAPE)] == drawn
    other = AblationGrid({"mine": "L1H2,L1H3,L2H0"}, kinds=(), draws=20, seed=4)
    assert [condition.heads for condition in other.conditions(SHAPE)] != drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": {}}, "at least one list"),
        ({"heads": {"a": "L0H0=0.5"}}, "without factors"),
        ({"heads": {"a": "L0N1"}}, "without factors"),
        ({"kinds": ("pairs",)}, "no 'pairs' head sets; there are together, single"),
        ({"kinds": ("single", "single")}, "twice"),
        ({"scales": (1.0,)}, "a scale of 1 is no ablation"),
        ({"scales": (float("nan"),)}, "a scale of nan"),
        ({"scales": ()}, "at least one scale"),
        ({"kinds": ()}, "at least one kind of head sets"),
        ({"draws": -1}, "must not be negative"),
        ({"draws": 10**12}, "at most 10000"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_before_a_model_is_loaded(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        AblationGrid(**{"heads": {"a": "L0H0"}} | arguments)  # type: ignore[arg-type]


def test_a_random_draw_that_finds_too_few_other_heads_is_told(caplog: pytest.LogCaptureFixture) -> None:
    found = AblationGrid({"wide": "L0,L1H0"}, draws=2).conditions(SHAPE)

    assert [len(condition.heads) for condition in found] == [SHAPE.heads + 1, 1, 1]
    assert [record.message for record in caplog.records] == [
        f"wide: too few other heads: a random draw has 1 for {SHAPE.heads + 1} given ones"
    ]


def test_a_grid_without_conditions_is_refused() -> None:
    with pytest.raises(UsageError, match="leave-one-out needs lists of at least two heads"):
        AblationGrid({"a": "L0H0"}, kinds=("leave-one-out",)).conditions(SHAPE)
    with pytest.raises(UsageError, match="leave no other heads to draw"):
        AblationGrid({"a": "L0"}, draws=1).conditions(SHAPE)


def test_items_are_those_a_study_of_the_same_seed_and_sizes_holds_out() -> None:
    split = get_task("antonyms").split(2, 30, 12)

    assert held_out(["antonyms"], 2, search_items=30, held_out_items=12) == {"antonyms": split.held_out}
    assert held_out(["antonyms"], 2, 5, 30, 12)["antonyms"] == split.held_out[:5]


def test_tasks_of_lm_eval_are_asked_as_the_study_asked_them(tmp_path: Path) -> None:
    write_sum_task(tmp_path)
    options = {"include_path": str(tmp_path), "num_fewshot": {"own_sum": 1}}
    study = parse_study({"model": "m", "tasks": ["own_sum"], "controls": ["copying"], "lm_eval": options})
    items = StudyHeads(study, {"own_sum": "L0H0"}, study.engine).held_out(limit=3)
    assert {task: len(asked) for task, asked in items.items()} == {"own_sum": 3, "copying": 3}
    assert all(item.prompt.count("Q: ") == 2 for item in items["own_sum"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--heads", "L0H0", "--tasks", "antonyms"), "--model"),
        (("--heads", "L0H0", "--model", "m"), "--tasks"),
        (("--heads", "L0H0", "--model", "m", "--tasks", "antonyms", "--sets", "single"), "--out"),
        (("--heads-from", "nowhere"), "--out"),
        (("--heads-from", "nowhere", "--out", "x"), "nowhere holds no finished study"),
        (("--heads", "L0H0", "--model", "m", "--tasks", "antonyms", "--out", "x", "--scales", "half"), "--scales half"),
        (("--heads", "L0H0", "--model", "m", "--tasks", "antonyms", "--out", "x", "--sets", "pairs"), "'pairs'"),
        (("--heads", "L0H0", "--model", "m", "--tasks", "antonyms", "--out", "x", "--random", "-1"), "negative"),
        (("--heads", "L0H0", "--model", "m", "--tasks", "antonyms", "--out", "x", "--sets", ""), "one kind"),
        (("--heads", "L0H0", "--model", "m", "--tasks", "antonyms", "--out", "x", "--scales", ""), "one scale"),
        (("--heads-from", "nowhere", "--out", "x", "--tasks", ","), "names no task"),
    ],
)
def test_a_mistake_in_a_grid_of_ablations_is_one_line_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code = main(["ablate", *arguments])

    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


def test_samples_do_not_take_the_place_of_a_link_to_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")

    code = main(
        ["ablate", "--heads", "L0H0", "--model", "m", "--tasks", "antonyms", "--log-samples", str(tmp_path / "loop")]
    )

    error = capsys.readouterr().err
    assert code == 2
    assert f"cannot write to {tmp_path / 'loop'}" in error
    assert error.count("\n") == 1
