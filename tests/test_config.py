from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from cs_localize.config import StudyConfig, dump_study, load_study, parse_study
from cs_localize.errors import UsageError
from cs_localize.options import apply_overrides
from cs_localize.study import check_study

MINIMAL: dict[str, Any] = {"model": "smollm2-135m-instruct", "tasks": ["antonyms", "plurals"]}


def refusal(data: object) -> str:
    """The message a study is refused with, which must be one line."""
    with pytest.raises(UsageError) as error:
        parse_study(data, "study.yaml")
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith("study.yaml: ")
    return message.removeprefix("study.yaml: ")


def test_a_model_and_tasks_make_a_study() -> None:
    study = parse_study(MINIMAL)
    assert study.tasks == ("antonyms", "plurals")
    assert study.engine.name == "vllm"
    assert study.design.requests == 900


@pytest.mark.parametrize(
    ("section", "option"),
    [
        (None, "taks"),
        ("engine", "nmae"),
        ("design", "request"),
        ("solver", "alpha"),
        ("select", "limits"),
        ("confirm", "draws"),
        ("crosscheck", "dosis"),
    ],
)
def test_an_unknown_option_is_named(section: str | None, option: str) -> None:
    data = {**MINIMAL, option: 1} if section is None else {**MINIMAL, section: {option: 1}}
    where = option if section is None else f"{section}.{option}"
    assert refusal(data) == f"unknown option '{where}'"


def test_an_unknown_option_two_sections_deep_is_named() -> None:
    assert refusal({**MINIMAL, "design": {"pilot": {"heads": 3}}}) == "unknown option 'design.pilot.heads'"


def test_the_first_of_several_problems_is_named_and_the_others_counted() -> None:
    message = refusal({**MINIMAL, "one": 1, "two": 2, "three": 3})
    assert message == "unknown option 'one' (and 2 more)"


def test_answers_to_log_need_the_confirmation_that_asks_for_them() -> None:
    message = refusal({**MINIMAL, "confirm": {"log_samples": True, "enabled": False}, "crosscheck": {"enabled": False}})
    assert message.startswith("'confirm': log_samples writes the confirmation's answers")


def test_a_missing_model_is_named() -> None:
    assert refusal({"tasks": ["antonyms"]}) == "'model' is required"


@pytest.mark.parametrize("data", [None, [], "model", 3])
def test_what_is_no_mapping_is_refused_with_an_example(data: object) -> None:
    assert refusal(data) == "expected 'key: value' lines such as 'model: smollm2-135m-instruct'"


@pytest.mark.parametrize(
    ("section", "option", "value"),
    [
        (None, "tasks", []),
        (None, "search_items", 0),
        (None, "held_out_items", 0),
        (None, "seed", -1),
        ("engine", "name", "jax"),
        ("engine", "dtype", "float16"),
        ("engine", "workers", 0),
        ("engine", "threads", 0),
        ("engine", "unit_tokens", 0),
        ("engine", "max_num_seqs", 4097),
        ("engine", "neuron_slots", 0),
        ("engine", "gpu_memory_utilization", 1.1),
        ("engine", "kv_cache_gib", 0),
        ("design", "kind", "hadamard"),
        ("design", "requests", 0),
        ("design", "density", 0.51),
        ("design", "density", 0),
        ("design", "fragile_density", 0),
        ("design", "block", 0),
        ("solver", "name", "magic"),
        ("select", "share", 0),
        ("select", "share", 1.01),
        ("select", "limit", 0),
        ("select", "bootstrap", -1),
        ("select", "by", "luck"),
        ("select", "error_rate", 0),
        ("select", "error_rate", 1),
        ("select", "resamples", -1),
        ("select", "permutations", -1),
        ("select", "tests", {"items": 1}),
        ("select", "tests", {"least_effect": -0.1}),
        ("confirm", "random_draws", -1),
        ("confirm", "random_on", "controls"),
        ("confirm", "bootstrap", 99),
        ("crosscheck", "items", 1),
        ("crosscheck", "sigma", 0),
        ("crosscheck", "random_draws", 0),
        ("crosscheck", "dose", ["few"]),
        ("crosscheck", "dose", [True]),
        (None, "model", 3),
        (None, "search_items", True),
        (None, "seed", 10**40),
        (None, "ledger", "a\0b"),
        ("engine", "workers", 10**40),
        ("engine", "kv_cache_gib", float("inf")),
        ("engine", "planted", {"seed": date(2026, 1, 1)}),
        ("design", "requests", True),
        ("design", "requests", 10**7),
        ("design", "density", float("nan")),
        ("solver", "options", {"alpha": float("inf")}),
        ("select", "ratio", float("inf")),
        ("confirm", "bootstrap", 10**7),
        ("confirm", "random_draws", 10**5),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_the_name_of_its_option(
    section: str | None, option: str, value: object
) -> None:
    data = {**MINIMAL, option: value} if section is None else {**MINIMAL, section: {option: value}}
    where = option if section is None else f"{section}.{option}"
    assert refusal(data).startswith(f"'{where}")


def test_a_task_listed_twice_is_refused() -> None:
    message = refusal({**MINIMAL, "tasks": ["plurals", "antonyms", "plurals"]})
    assert message == "'tasks': plurals is listed twice"
    assert refusal({**MINIMAL, "controls": ["copying", "copying"]}) == "'controls': copying is listed twice"


@pytest.mark.parametrize("name", ["universal", "universal-heads", "design.masks"])
def test_a_task_cannot_have_a_name_that_results_use_for_something_else(name: str) -> None:
    data = {name: "my.jsonl"}
    for option in ("tasks", "controls"):
        assert f"'{option}': a task cannot be called '{name}'" in refusal({**MINIMAL, "data": data, option: [name]})


def test_a_task_is_not_its_own_control() -> None:
    message = refusal({**MINIMAL, "controls": ["copying", "plurals"]})
    assert message == "plurals is both in tasks and in controls; a task of the study is a control already"


def test_only_tasks_of_the_study_are_cross_checked() -> None:
    assert parse_study({**MINIMAL, "crosscheck": {"tasks": ["plurals"]}}).crosscheck.tasks == ("plurals",)
    message = refusal({**MINIMAL, "controls": ["copying"], "crosscheck": {"tasks": ["copying"]}})
    assert message == "crosscheck.tasks names copying, which is not in tasks"


def test_more_heads_cannot_be_named_than_are_candidates() -> None:
    assert refusal({**MINIMAL, "select": {"limit": 11}}) == "'select': limit (11) cannot exceed candidates (10)"


@pytest.mark.parametrize(
    "design",
    [{}, {"kind": "bernoulli", "unit": "block"}, {"kind": "bernoulli", "knock_out": "kv_group"}, {"masks": "m.npy"}],
)
def test_knockoffs_are_for_masks_drawn_independently_for_every_request(design: dict[str, str]) -> None:
    message = refusal({**MINIMAL, "select": {"by": "knockoffs"}, "design": design})
    assert "set design.kind to bernoulli, design.unit to request and design.knock_out to head" in message
    assert parse_study({**MINIMAL, "select": {"by": "knockoffs"}, "design": {"kind": "bernoulli"}})


def test_densities_are_given_by_layer_or_range_of_layers() -> None:
    design = parse_study({**MINIMAL, "design": {"layer_density": {0: 0.01, "3-5": 0.02}}}).design
    assert design.densities == {0: 0.01, 3: 0.02, 4: 0.02, 5: 0.02}
    assert (
        parse_study(yaml.safe_load(dump_study(parse_study({**MINIMAL, "design": design.model_dump()})))).design
        == design
    )


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ({"first": 0.1}, "'first' is neither a layer, such as 3, nor a range, such as 0-2"),
        ({"5-3": 0.1}, "'5-3' is neither a layer"),
        ({-1: 0.1}, "'-1' is neither a layer"),
        ({"0-2": 0.1, 2: 0.2}, "layer_density gives layer 2 twice"),
        ({0: 0.7}, "less than or equal to 0.5"),
        ({True: 0.1}, "write the name True in quotes"),
        ([0.1], "give options"),
    ],
)
def test_layers_that_are_none_are_refused(layers: object, problem: str) -> None:
    assert problem in refusal({**MINIMAL, "design": {"layer_density": layers}})


def test_masks_of_ones_own_exclude_what_only_drawn_ones_have() -> None:
    for name, value in {
        "density": 0.1,
        "kind": "bernoulli",
        "knock_out": "kv_group",
        "layer_density": {0: 0.1},
        "pilot": {"requests_a_layer": 1},
    }.items():
        message = refusal({**MINIMAL, "design": {"masks": "m.npy", name: value}})
        assert message == f"'design': masks of your own leave nothing for {name} to say; give one of the two"
    study = parse_study({**MINIMAL, "design": {"masks": "m.npy"}})
    assert study.design.pilot_requests(30) == 0
    assert parse_study(yaml.safe_load(dump_study(study))) == study
    assert study.located(Path("/studies")).design.masks == "/studies/m.npy"


@pytest.mark.parametrize("method", ["sweep", "thin_sweep", "greedy", "stepwise", "thompson", "attribution", "random"])
def test_options_that_a_method_would_ignore_are_refused(method: str) -> None:
    for section, option, value in (
        ("design", "requests", 300),
        ("design", "pilot", {"requests_a_layer": 0}),
        ("solver", "name", "omp"),
        ("solver", "options", {"alpha": 0.02}),
        ("select", "resamples", 0),
        ("select", "permutations", 0),
        ("select", "bootstrap", 20),
    ):
        assert refusal({**MINIMAL, "method": method, section: {option: value}}) == (
            f"the method {method} has no use for {section}.{option}; leave it out, or name the method sparse"
        )
    plain = parse_study({**MINIMAL, "method": method, "select": {"limit": 3, "resamples": 30}})
    assert parse_study(yaml.safe_load(dump_study(plain))) == plain


def test_the_folder_of_yaml_tasks_is_beside_the_study_wherever_the_command_is_given(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "lm_eval": {"include_path": "mine"}}))
    assert load_study(path).lm_eval.include_path == str(tmp_path / "mine")
    with pytest.raises(UsageError) as refused:
        load_study(path, ("lm_eval.include_path=yours",))
    looked = tmp_path / "yours"
    assert str(refused.value) == (
        f"{path}: lm_eval.include_path: there is no folder yours beside the study: {looked} was looked for"
    )


def test_the_record_of_a_study_is_read_without_the_folder_of_its_yaml_tasks_which_may_be_gone(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, "lm_eval": {"include_path": "/no/such"}}))
    record = load_study(path)
    assert record.lm_eval.include_path == "/no/such"
    with pytest.raises(UsageError, match=r"^lm_eval.include_path: there is no folder /no/such$"):
        check_study(record)


def test_a_study_cannot_be_changed_once_validated() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_study(MINIMAL).__setattr__("seed", 3)


def test_the_written_study_is_the_same_study_with_every_default_spelt_out(tmp_path: Path) -> None:
    study = parse_study({**MINIMAL, "controls": ["copying"], "solver": {"options": {"alpha": 0.02}}})
    path = tmp_path / "study.yaml"
    path.write_text(dump_study(study), encoding="utf-8")
    assert load_study(path) == study
    assert yaml.safe_load(dump_study(study))["design"]["pilot"] == {"requests_a_layer": 2, "heads_a_mask": 3}
    assert dump_study(load_study(path)) == dump_study(study)


def test_every_option_has_a_description() -> None:
    sections = [StudyConfig]
    bare = []
    for section in sections:
        for name, field in section.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and hasattr(inner, "model_fields"):
                sections.append(inner)
            elif not (field.description or "").endswith("."):
                bare.append(f"{section.__name__}.{name}")
    assert len(sections) == 11
    assert bare == []


def study_file(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_reach_into_sections_and_their_values_are_yaml(tmp_path: Path) -> None:
    path = study_file(tmp_path, yaml.safe_dump({**MINIMAL, "design": {"requests": 300}}))
    study = load_study(
        path,
        (
            "design.requests=600",
            "design.pilot.heads_a_mask=2",
            "tasks=[capitals, addition]",
            "ledger=null",
            "crosscheck.enabled=false",
            "solver.options.alpha=0.05",
            "model=path/with=sign",
        ),
    )
    assert study.design.requests == 600
    assert study.design.pilot.heads_a_mask == 2
    assert study.design.pilot.requests_a_layer == 2
    assert study.tasks == ("capitals", "addition")
    assert study.ledger is None
    assert not study.crosscheck.enabled
    assert study.solver.options == {"alpha": 0.05}
    assert study.model == "path/with=sign"


def test_a_number_may_be_written_with_an_exponent_and_no_dot_and_such_text_stays_text(tmp_path: Path) -> None:
    path = study_file(tmp_path, "model: '1e3'\ntasks: [antonyms]\nsolver: {options: {alpha: 1e-3, other: '2E+5'}}\n")
    study = load_study(path)
    assert (study.model, study.solver.options) == ("1e3", {"alpha": 0.001, "other": "2E+5"})
    path.write_text(dump_study(study), encoding="utf-8")
    assert load_study(path) == study


def test_the_last_override_of_an_option_holds() -> None:
    assert apply_overrides({}, ("a.b=1", "a.c=2", "a.b=3")) == {"a": {"b": 3, "c": 2}}


def test_overrides_leave_the_mapping_they_were_given_alone() -> None:
    data = {"a": {"b": {"c": 1}}}
    assert apply_overrides(data, ("a.b.c=2", "a.d=3")) == {"a": {"b": {"c": 2}, "d": 3}}
    assert data == {"a": {"b": {"c": 1}}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("design.requests", "write it as option=value"),
        ("=3", "write it as option=value"),
        ("design..requests=3", "write it as option=value"),
        ("design.=3", "write it as option=value"),
        ("model.name=3", "'model' is not a section"),
        ("design.requests=[1", "the value is not valid YAML"),
        ("design.request=3", "unknown option 'design.request'"),
        ("design.requests=many", "'design.requests'"),
        ("design.requests=2026-13-01", "the value is not valid YAML"),
        ("design={requests: 1, requests: 2}", "'requests' is given twice"),
        ("tasks=antonyms", "'tasks': give a list, in brackets with commas between"),
        ("model=3", "'model': give text, a number in quotes"),
        ("tasks=[]", "'tasks': give at least one"),
    ],
)
def test_a_malformed_override_is_refused_in_one_line(override: str, message: str, tmp_path: Path) -> None:
    path = study_file(tmp_path, yaml.safe_dump(MINIMAL))
    with pytest.raises(UsageError) as error:
        load_study(path, (override,))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "is not valid YAML"),
        ("model: a\n  tasks: b\n", "is not valid YAML"),
        ("\tmodel: a", "is not valid YAML"),
        ("", "expected 'key: value' lines"),
        ("- model\n- tasks\n", "expected 'key: value' lines"),
        ("model: !!python/object:os.system {}\n", "is not valid YAML"),
        ("model: a\ntasks: [b]\nmodel: c\n", "'model' is given twice"),
        ("design: {requests: 1, density: 0.1, requests: 2}\n", "'requests' is given twice"),
        ("model: 2026-13-01\n", "is not valid YAML"),
        (f"model: {'9' * 5000}\n", "is not valid YAML"),
        (f"model: {'[' * 5000}\n", "is not valid YAML"),
        ("model: m\ntasks: [a]\nsolver: {options: &o {alpha: *o}}\n", "'solver.options'"),
    ],
)
def test_a_malformed_file_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = study_file(tmp_path, text)
    with pytest.raises(UsageError) as error:
        load_study(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_one_mapping_may_be_used_in_two_places(tmp_path: Path) -> None:
    base = "x: &x {requests: 5}\n"
    path = study_file(tmp_path, "model: m\ntasks: [antonyms]\ndesign: {pilot: &p {heads_a_mask: 2}}\n")
    assert load_study(path, ("design.pilot.requests_a_layer=3",)).design.pilot.heads_a_mask == 2
    path = study_file(tmp_path, base + "model: m\ntasks: [antonyms]\ndesign: {<<: *x, requests: 7}\n")
    with pytest.raises(UsageError, match="unknown option 'x'"):
        load_study(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no study file at"):
        load_study(tmp_path / "absent.yaml")
    with pytest.raises(UsageError, match="cannot read"):
        load_study(tmp_path)
    path = tmp_path / "study.yaml"
    path.write_bytes(b"model: \xff\xfe")
    with pytest.raises(UsageError, match="cannot read"):
        load_study(path)
