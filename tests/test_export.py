from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cs_localize import __version__
from cs_localize.cli import main
from cs_localize.errors import UsageError
from cs_localize.export import export_checkpoint
from cs_localize.findings import write_file
from cs_localize.heads import Ablation
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.models import random_model, read_shape
from cs_localize.models.files import fingerprint
from cs_localize.outcomes import Item
from tests.measure.process import in_process
from tests.measure.vllm_child import answer_named
from tests.models.builders import weights, write_model
from tests.report.builders import heads_file
from tests.vllm_plain import plain_scores

O_PROJ = "model.layers.{}.self_attn.o_proj.weight"
DOWN_PROJ = "model.layers.{}.mlp.down_proj.weight"


def model(directory: Path, **fields: object) -> Path:
    """A complete directory of two layers with 4 heads of 8 and 48 neurons; nothing but numpy reads or writes it."""
    tensors = {
        name.replace("o_proj", "self_attn.o_proj").replace("down_proj", "mlp.down_proj"): value
        for name, value in weights().items()
    }
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.ones(32, np.float32)
    return write_model(directory, tensors, **fields)


def read(directory: Path) -> dict[str, np.ndarray]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(("export", *arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("cs-localize: ")
    assert error.count("\n") == 1, "one line"
    return error


@pytest.mark.parametrize(
    ("removed", "zero"),
    [
        ("L1H2", {O_PROJ.format(1): range(16, 24)}),
        ("L0G1", {O_PROJ.format(0): range(16, 32)}),
        ("L1", {O_PROJ.format(1): range(32)}),
        ("L0N47", {DOWN_PROJ.format(0): range(47, 48)}),
        ("L1H0,L1N3,L1N4", {O_PROJ.format(1): range(8), DOWN_PROJ.format(1): range(3, 5)}),
    ],
)
def test_exactly_the_columns_of_what_is_removed_are_zero_and_all_else_is_the_same_to_the_bit(
    tmp_path: Path, removed: str, zero: dict[str, range]
) -> None:
    source = model(tmp_path / "source")

    export_checkpoint(str(source), removed, tmp_path / "out")

    expected = read(source)
    for name, columns in zero.items():
        expected[name][:, columns.start : columns.stop] = 0
    found = read(tmp_path / "out")
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


def test_shards_index_and_dtype_stay_and_matrices_of_many_pieces_are_done_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cs_localize.models.zeroed._PIECE_BYTES", 300)
    source = model(tmp_path / "source")
    whole = {name: value.astype(np.float16) for name, value in read(source).items()}
    (source / "model.safetensors").unlink()
    names = sorted(whole)
    shards = {"model-1-of-2.safetensors": names[:2], "model-2-of-2.safetensors": names[2:]}
    for file, held in shards.items():
        save_file({name: whole[name] for name in held}, source / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in shards.items() for name in held}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "pytorch_model.bin.index.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    (source / "generation_config.json").write_text('{"eos_token_id": 2}')

    export_checkpoint(str(source), "L0H3,L1H3", tmp_path / "out")

    for layer in range(2):
        whole[O_PROJ.format(layer)][:, 24:] = 0
    found = read(tmp_path / "out")
    assert all((found[name] == value).all() and found[name].dtype == np.float16 for name, value in whole.items())
    copied = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json", *shards}
    assert {file.name for file in (tmp_path / "out").iterdir()} == copied | {"README.md"}
    for name in copied - shards.keys():
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_the_model_card_says_what_was_removed_from_what_by_what(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "new" / "out"

    assert main(("export", "--model", str(source), "--heads", "L0G1", "--neurons", "L1N7", "--out", str(out))) == 0

    card = (out / "README.md").read_text()
    for part in (
        f"# {source} without 2 attention heads and 1 FFN neuron",
        f"| its fingerprint | `{fingerprint(source)}` |",
        "| heads removed | L0H2, L0H3 |",
        "| neurons removed | L1N7 |",
        f"cs_localize {__version__}",
        f"`cs-localize export --model {source} --heads L0G1 --neurons L1N7 --out {out}`",
        f"| `{O_PROJ.format(0)}` | 16-23, 24-31 |",
        f"| `{DOWN_PROJ.format(1)}` | 7 |",
    ):
        assert part in card
    printed = capsys.readouterr().out
    assert f"checkpoint: {out}" in printed
    assert fingerprint(out) in printed
    assert fingerprint(out) != fingerprint(source)


def test_the_heads_of_a_study_are_removed_by_task(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, study = model(tmp_path / "source"), tmp_path / "study"
    study.mkdir()
    (study / "study.yaml").write_text(f"model: {source}\ntasks: [antonyms, capitals]\n")
    found = heads_file()
    named = {"antonyms": "L0H1", "capitals": "L1H1"}
    tasks = {task: found.tasks[task].model_copy(update={"named": [head]}) for task, head in named.items()}
    write_file(study / "heads.json", found.model_copy(update={"model": str(source), "tasks": tasks, "universal": []}))
    given = ("--heads-from", str(study), "--out", str(tmp_path / "out"))

    assert "choose with --task one of antonyms, capitals" in fails(capsys, *given)
    assert "no heads for 'plurals'" in fails(capsys, *given, "--task", "plurals")
    assert main(("export", *given, "--task", "capitals")) == 0

    assert not read(tmp_path / "out")[O_PROJ.format(1)][:, 8:16].any()
    assert (read(tmp_path / "out")[O_PROJ.format(0)] == read(source)[O_PROJ.format(0)]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--heads", "L4Q2"), "not a head"),
        (("--heads", "L0H0=0.5"), "leave the factors out"),
        (("--heads", "L2H0"), "out of range"),
        (("--heads", "L0G2"), "KV groups 0..1"),
        (("--heads", "L0,L0H1"), "twice"),
        (("--neurons", "L0H1"), "not a neuron"),
        (("--neurons", "L0N48"), "out of range"),
        ((), "name at least one head"),
        (("--heads", "L0H0", "--task", "antonyms"), "--heads-from"),
    ],
)
def test_a_mistake_in_what_to_remove_is_one_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    source = model(tmp_path / "source")

    assert message in fails(capsys, "--model", str(source), "--out", str(tmp_path / "out"), *arguments)

    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def rename_o_proj(source: Path) -> None:
    save_file({name.replace("o_proj", "dense"): value for name, value in read(source).items()}, weight(source))


def drop_a_layer(source: Path) -> None:
    save_file({name: value for name, value in read(source).items() if ".layers.1." not in name}, weight(source))


def double_a_layer(source: Path) -> None:
    tensors = read(source)
    save_file({**tensors, f"draft.{O_PROJ.format(0)}": tensors[O_PROJ.format(0)]}, weight(source))


def narrow(source: Path) -> None:
    save_file({name: value[..., :24].copy() for name, value in read(source).items()}, weight(source))


def pack(source: Path) -> None:
    save_file({name: value.astype(np.int8) for name, value in read(source).items()}, weight(source))


def cut(source: Path) -> None:
    weight(source).write_bytes(weight(source).read_bytes()[:-1])


def garble(source: Path) -> None:
    weight(source).write_bytes(b"not safetensors at all")


def rename_the_file(source: Path) -> None:
    weight(source).rename(source / "weights.safetensors")


def shard(source: Path, listed: int) -> None:
    """Two files of one layer each, of which the index lists the first or both."""
    tensors = read(source)
    weight(source).unlink()
    held: list[dict[str, np.ndarray]] = [{}, {}]
    for name, value in tensors.items():
        held[".layers.1." in name][name] = value
    files = [f"model-{number}-of-2.safetensors" for number in (1, 2)]
    for file, part in zip(files, held, strict=True):
        save_file(part, source / file)
    index = {name: file for file, part in list(zip(files, held, strict=True))[:listed] for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def leave_a_shard_out_of_the_index(source: Path) -> None:
    shard(source, 1)


def remove_a_shard(source: Path) -> None:
    shard(source, 2)
    (source / "model-2-of-2.safetensors").unlink()


def write_beside(name: str) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        (source / name).write_text("{}")

    return change


def configure(**fields: object) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | fields))

    return change


def weight(source: Path) -> Path:
    return source / "model.safetensors"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (rename_o_proj, "(model_type 'llama') has no tensor layers.0.self_attn.o_proj.weight"),
        (drop_a_layer, "has no tensor layers.1.self_attn.o_proj.weight"),
        (double_a_layer, "has two self_attn.o_proj.weight in layer 0"),
        (narrow, "is [32, 24], expected 32 columns"),
        (pack, "is I8; unquantized weights are needed"),
        (cut, "cut short or damaged"),
        (garble, "not a safetensors file"),
        (leave_a_shard_out_of_the_index, "has no tensor layers.1.self_attn.o_proj.weight"),
        (remove_a_shard, "lacks model-2-of-2.safetensors"),
        (rename_the_file, "needs its weights in model.safetensors alone"),
        (configure(quantization_config={"quant_method": "gptq"}), "is quantized (gptq)"),
        (configure(quantization={"bits": 4}), "is quantized (quantization)"),
        (write_beside("hf_quant_config.json"), "is quantized (hf_quant_config.json)"),
        (write_beside("adapter_config.json"), "has an adapter (adapter_config.json)"),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused_by_name_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: Callable[[Path], None], message: str
) -> None:
    source = model(tmp_path / "source")
    fault(source)

    assert message in fails(
        capsys, "--model", str(source), "--heads", "L0H0", "--out", str(tmp_path / "deep" / "er" / "out")
    )

    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_what_is_there_already_is_never_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    before = fingerprint(source)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    given = ("--model", str(source), "--heads", "L0H0", "--out")

    assert "is not empty" in fails(capsys, *given, str(source))
    assert "is a file" in fails(capsys, *given, str(tmp_path / "file"))
    assert f"{tmp_path / 'file'} is a file" in fails(capsys, *given, str(tmp_path / "file" / "below" / "out"))
    assert main(("export", *given, str(tmp_path / "empty"))) == 0

    assert (fingerprint(source), (tmp_path / "file").read_text()) == (before, "mine")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


@pytest.mark.parametrize("out", ["loop", "loop/out", "~nobody-of-that-name/out"])
def test_a_folder_that_leads_nowhere_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: str
) -> None:
    source = model(tmp_path / "source")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)

    assert "name another folder" in fails(capsys, "--model", str(source), "--heads", "L0H0", "--out", out)


def test_a_model_whose_name_cannot_be_written_down_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "m\udce9")
    with pytest.raises(UsageError, match="is not valid UTF-8"):
        export_checkpoint(str(source), "L0H0", tmp_path / "out")


def test_a_folder_that_is_filled_meanwhile_is_not_overwritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "out"

    def meanwhile(*_: object) -> None:
        out.mkdir()
        (out / "mine").write_text("mine")

    monkeypatch.setattr("cs_localize.export.copy_with_zeros", meanwhile)

    with pytest.raises(UsageError, match="is not empty"):
        export_checkpoint(str(source), "L0H0", out)

    assert [file.name for file in out.iterdir()] == ["mine"]
    assert {file.name for file in tmp_path.iterdir()} == {"source", "out"}


@pytest.mark.parametrize("large", ["model.safetensors", "tokenizer.json", "additional_chat_templates/tool_use.jinja"])
def test_a_file_that_the_system_does_not_take_is_said_of_the_copy_and_not_of_the_source(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, large: str
) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "deep" / "out"
    (source / "additional_chat_templates").mkdir()
    for name in ("tokenizer.json", "additional_chat_templates/tool_use.jinja"):
        (source / name).write_bytes(b" " * (100_000 if large == name else 2))
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, usual[1]))  # bytes; a write beyond fails
    try:
        code = main(("export", "--model", str(source), "--heads", "L0H0", "--out", str(out)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)

    assert code == 1
    assert capsys.readouterr().err == f"cs-localize: [Errno 27] File too large: '{out}'\n"
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_folder_that_cannot_be_replaced_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "mounted"
    out.mkdir()

    def busy(self: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self), None, str(target))

    monkeypatch.setattr(Path, "rename", busy)

    message = fails(capsys, "--model", str(source), "--heads", "L0H0", "--out", str(out))

    assert "mount point; name a new folder in it" in message
    assert {file.name for file in tmp_path.iterdir()} == {"source", "mounted"}


def test_who_may_read_the_folder_is_as_for_any_other_that_the_user_makes(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    usual = os.umask(0o027)
    try:
        export_checkpoint(str(source), "L0H0", tmp_path / "out")
    finally:
        os.umask(usual)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_full_disk_or_an_interruption_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
) -> None:
    source, out = model(tmp_path / "source"), tmp_path / "deep" / "er" / "out"

    def full(*_: object) -> None:
        assert any((tmp_path / "deep" / "er").iterdir()), "some of it is written by then"
        raise error

    monkeypatch.setattr("os.fsync", full)

    code = main(("export", "--model", str(source), "--heads", "L0H0", "--out", str(out)))

    assert code == (1 if isinstance(error, OSError) else 130)
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert (f"the disk is full ({out})" in message) == isinstance(error, OSError)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def request(seed: int, ablation: Ablation) -> Request:
    ids = tuple(int(i) for i in np.random.default_rng(seed).integers(32, 120, 43))
    return Request(Item("random", str(seed), "", "x"), ids[:40], ids[40:], ablation)


@pytest.mark.model
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("removed", ["L0H1,L1H0,L1H3", "L0N1,L0N2,L1N95,L1N17", "L1,L0G0,L0N5"])
def test_plain_transformers_computes_from_an_export_what_the_hf_engine_does_under_the_ablation(
    architecture: str, removed: str, tmp_path: Path
) -> None:
    import torch
    import transformers

    from cs_localize.measure.hf import HFEngine
    from cs_localize.spelling import spell_out

    source = random_model(tmp_path / "source", architecture)
    made = export_checkpoint(str(source), removed, tmp_path / "out")

    engine = HFEngine(source, dtype="float32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32).eval()
    ids = torch.randint(32, 120, (2, 24), generator=torch.Generator().manual_seed(0))
    ablation = Ablation.decode(spell_out(removed, engine.shape))
    with torch.no_grad():
        exported, unablated = plain(ids).logits, engine.model(ids).logits
        with engine.hooks.applied([ablation] * 2):
            masked = engine.model(ids).logits

    assert (exported - masked).abs().max() < 1e-5
    assert (exported - unablated).abs().max() > 1e-2
    assert transformers.AutoTokenizer.from_pretrained(made.path)("a b").input_ids


@pytest.mark.model
@pytest.mark.vllm
def test_plain_vllm_scores_from_an_export_what_the_masked_engine_does_under_the_ablation(tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", "qwen3")
    ablation = Ablation.decode("L0H1,L1H0,L0N3,L1N4,L1N95")
    made = export_checkpoint(str(source), ablation.encode(), tmp_path / "out")
    resources = {"kv_cache_gib": 1, "max_num_seqs": 16}
    spec = EngineSpec("vllm", str(source), fingerprint(source), read_shape(source), "float32", resources=resources)
    masked = [request(seed, ablation) for seed in range(6)]
    asked = {"masked": masked, "unablated": [replace(one, ablation=Ablation()) for one in masked]}

    answers = in_process(answer_named, spec, asked)
    scores = in_process(plain_scores, replace(spec, model_dir=str(made.path)), masked)

    apart = [abs(outcome.score - score) for outcome, score in zip(answers["masked"], scores, strict=True)]
    moved = [abs(outcome.score - score) for outcome, score in zip(answers["unablated"], scores, strict=True)]
    assert max(apart) < 1e-3
    assert max(moved) > 0.1
