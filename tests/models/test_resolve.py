from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.models import known_models, resolve, smollm2
from cs_localize.models.files import fingerprint
from tests.models.builders import write_config, write_model

NAMES = ["smollm2-135m-instruct", "tiny-qwen2", "tiny-qwen3"]


def test_a_directory_resolves_to_itself(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    model = resolve(str(directory))
    assert (model.name, model.path) == (str(directory), directory.resolve())
    assert model.shape == ModelShape(layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48)
    assert model.fingerprint == fingerprint(directory)


def test_a_relative_directory_resolves_to_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "organisation" / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve("organisation/model").path == (tmp_path / "organisation" / "model").resolve()


@pytest.mark.usefixtures("empty_home")
def test_the_known_models_are_listed_with_whether_they_are_here() -> None:
    assert [(model.name, model.cached) for model in known_models()] == [(name, False) for name in NAMES]
    write_model(smollm2.directory())
    assert [model.cached for model in known_models()] == [True, False, False]


@pytest.mark.usefixtures("empty_home")
def test_a_known_model_that_is_here_is_not_made_again() -> None:
    write_model(smollm2.directory())
    assert resolve("smollm2-135m-instruct").path == smollm2.directory()


def test_an_unknown_name_is_answered_with_the_known_and_the_closest() -> None:
    with pytest.raises(UsageError, match="did you mean 'tiny-qwen3'") as raised:
        resolve("tiny_qwen3")
    assert all(name in str(raised.value) for name in NAMES)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["nothing-like-it", "/no/such/directory", "./no/such", "a/b/c", ""])
def test_a_name_that_is_nothing_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        resolve(name)


def test_a_directory_without_a_config_is_refused_rather_than_sought_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "organisation" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"'organisation/model' has no config\.json"):
        resolve("organisation/model")


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="lacks safetensors weights"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "."])
def test_only_a_hub_model_has_revisions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_model(tmp_path))
    with pytest.raises(UsageError, match="has no revisions"):
        resolve(name, revision="v2")


def test_a_model_that_needs_its_own_code_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, model_type="its_own", auto_map={"AutoModelForCausalLM": "modeling.Own"})
    with pytest.raises(UsageError, match=r"model_type 'its_own'.*code of its own \(auto_map\)"):
        resolve(str(tmp_path))


def test_a_model_that_transformers_supports_need_not_run_its_own_code(tmp_path: Path) -> None:
    write_model(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Own"})
    assert resolve(str(tmp_path)).shape.layers == 2


def test_resolving_a_directory_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write_model(tmp_path)
    code = (
        "import sys; from cs_localize.models import known_models, resolve; resolve(sys.argv[1]); known_models(); "
        "print([name for name in ('torch', 'transformers', 'vllm', 'ray') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "CS_LOCALIZE_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_config_that_cannot_be_studied_is_refused(tmp_path: Path) -> None:
    write_config(write_model(tmp_path), model_type="gpt2", n_layer=2)
    with pytest.raises(UsageError, match=r"'num_hidden_layers' \(model_type 'gpt2'\)"):
        resolve(str(tmp_path))
