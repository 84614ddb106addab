from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from cs_localize.cli import main
from cs_localize.errors import MeasurementError, UsageError
from cs_localize.heads import ModelShape
from cs_localize.models import random_model
from cs_localize.serving import ablation_args, llm_options, serve
from examples.server import ask, ask_all, serving

ROOT = Path(__file__).parent.parent
SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=3, ffn=5)
LONG = "hot -> cold\n" * 20  # a token a letter, so longer than a block of the cache


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What serving sets is for a process that serves."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(random_model(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The temporary folder of servers, whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def python(*arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.vllm
@pytest.mark.model
def test_vllms_own_llm_ablates_every_request_and_a_lost_hook_is_noticed(model: str) -> None:
    *_, none, zeroed, mixed, again, broken = python("-m", "tests.serving_child", model)
    assert none.startswith("none")
    assert none == again
    assert len({line.split(maxsplit=1)[1] for line in (none, zeroed, mixed)}) == 3
    assert broken.startswith("the hook on o_proj of layer 1 scaled 0 token rows, expected 3")


@pytest.mark.vllm
@pytest.mark.model
def test_the_server_keeps_ablations_apart_and_refuses_what_it_cannot_do(
    model: str, capsys: pytest.CaptureFixture[str], temporary: str
) -> None:
    def answer(heads: list[str], salt: str | None = None) -> tuple[list[float], int]:
        options = {"logprobs": 0, "cache_salt": salt} if salt else {"logprobs": 0}
        status, said = ask(url, model, LONG, heads, **options)
        assert status == 200, said
        usage = said["usage"]["prompt_tokens_details"]
        return said["choices"][0]["logprobs"]["token_logprobs"], usage["cached_tokens"] if usage else 0

    with serving(model, "--enable-prompt-tokens-details", "--dtype=float32") as url:
        plain, ablated, plain_again, ablated_again = (answer(heads)[0] for heads in ([], ["L0H1"], [], ["L0H1"]))
        cached = answer(["L0H1"])[1]
        fresh, none_cached = answer(["L0H1"], salt="another")
        refused = ask(url, model, LONG, ["L2H0"])
        ask_all(url, model)  # the rest of the example
    left = [name for name in os.listdir(temporary) if not name.startswith("torchinductor")]  # which torch keeps
    assert left == []
    assert plain_again == pytest.approx(plain, abs=1e-4)
    assert ablated_again == pytest.approx(ablated, abs=1e-4)
    assert fresh == pytest.approx(ablated, abs=1e-4), "a prefix of other requests was taken"
    assert abs(plain[0] - ablated[0]) > 1e-2
    assert cached >= 128 > none_cached
    assert (refused[0], refused[1]["error"]["message"].startswith("L2H0 is out of range")) == (400, True)
    none, zeroed, _, again, unknown = capsys.readouterr().out.splitlines()
    assert none == again != zeroed
    assert unknown.split(maxsplit=2)[:2] == ["L999H0", "400"]


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Where every server that is started, though none of vLLM's is, would have its sockets; a folder that is there."""
    seen: list[str | None] = []

    def start(options: argparse.Namespace) -> None:
        seen.append(os.environ.get("VLLM_RPC_BASE_PATH"))
        assert seen[-1] is None or Path(seen[-1]).is_dir()

    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    monkeypatch.setattr("vllm.entrypoints.cli.serve.ServeSubcommand.cmd", staticmethod(start))
    return seen


@pytest.mark.vllm
def test_a_server_follows_another_in_one_process_with_sockets_of_its_own(
    model: str, sockets: list[str | None], temporary: str
) -> None:
    for _ in range(2):
        serve(model, host="127.0.0.1", port=8000, eager=True)
    first, second = sockets
    assert first is not None
    assert second is not None
    assert first != second
    assert Path(first).parent == Path(temporary)
    assert os.listdir(temporary) == []
    assert "VLLM_RPC_BASE_PATH" not in os.environ


@pytest.mark.vllm
def test_sockets_that_are_named_or_would_have_too_long_a_path_are_left_to_vllm(
    model: str, sockets: list[str | None], temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length in (49, 50):  # with '/cs_localize-12345678/' and a UUID, 107 bytes and one more
        folder = Path(temporary, "x" * (length - len(temporary) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        serve(model, host="127.0.0.1", port=8000, eager=True)
    longest, too_long = sockets
    assert longest is not None
    assert len(f"{longest}/{uuid4()}") == 107
    assert too_long is None
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", temporary)
    serve(model, host="127.0.0.1", port=8000, eager=True)
    assert sockets[-1] == os.environ["VLLM_RPC_BASE_PATH"] == temporary


def test_a_temporary_folder_too_long_for_any_socket_is_refused_before_the_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 70)
    with pytest.raises(UsageError, match=r"^vLLM needs a temporary folder .* set TMPDIR to one, such as /tmp"):
        serve("no-such-model", host="127.0.0.1", port=8000, eager=True)


def test_heads_that_the_model_lacks_or_means_are_refused_before_anything_is_asked() -> None:
    assert ablation_args(["L1H2", "L0H0=0.5"], SHAPE) == {"ablation": "L0H0=0.5,L1H2"}
    with pytest.raises(UsageError, match="L2H0 is out of range"):
        ablation_args(["L2H0"], SHAPE)
    with pytest.raises(UsageError, match=r"\{'L1H2': 0\.5\} is no list"):
        ablation_args({"L1H2": 0.5}, SHAPE)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="measured no means"):
        ablation_args(["L1H0=mean"], SHAPE)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "arguments",
    [
        ["--worker-cls=vllm.v1.worker.cpu_worker.CPUWorker"],
        ["--additional-config={}"],
        ["--grpc"],
    ],
)
def test_a_server_is_not_led_around_the_worker(arguments: list[str], model: str) -> None:
    with pytest.raises(UsageError, match="would answer without ablations"):
        serve(model, host="127.0.0.1", port=8000, eager=True, arguments=arguments)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "argument",
    [
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 2}',
        '--kv-transfer-config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}',
        "--kv-offloading-size=1",
        "--enable-dbo",
        "--pipeline-parallel-size=2",
    ],
)
def test_what_no_worker_starts_with_is_refused_before_any_starts(argument: str, model: str) -> None:
    name = argument.partition("=")[0]
    with pytest.raises(UsageError, match=f"^{name} is not supported under ablations"):
        serve(model, host="127.0.0.1", port=8000, eager=True, arguments=[argument])


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--enable-auto-tool-choice"], "requires --tool-call-parser"),
        (["--enable-log-outputs"], "requires --enable-log-requests"),
        (["--sse-keep-alive-interval=-1"], "sse-keep-alive-interval"),
        (["--chat-template=nowhere.jinja"], "nowhere.jinja"),
    ],
)
def test_options_of_vllm_that_do_not_go_together_are_told_in_one_line(
    arguments: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", model, "--", *arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if message in line]
    assert line.startswith("cs-localize: ")


@pytest.mark.vllm
def test_an_architecture_that_vllm_does_not_know_ends_the_server_in_one_line(model: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["UnheardOfForCausalLM"]}))
    with pytest.raises(MeasurementError, match=r"^vLLM could not serve the model: .*'UnheardOfForCausalLM'.*$"):
        serve(str(directory), host="127.0.0.1", port=8000, eager=True)


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.model
def test_a_model_whose_heads_cannot_be_ablated_ends_the_server_without_a_traceback(tmp_path: Path) -> None:
    random_model(tmp_path, "gpt_neox", kv_heads=4)
    command = [sys.executable, "-m", "cs_localize", "serve", "--model", str(tmp_path), "--port", str(free_port())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    cause, told = [line for line in done.stderr.splitlines() if line.startswith("cs-localize: ")]
    assert cause.endswith("is not recognised: 0 of 2 layers have a module named o_proj")
    assert told.startswith("cs-localize: vLLM could not serve the model: ")
    assert "Traceback" not in done.stderr


def test_the_other_runner_is_refused(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(UsageError, match="V2 model runner is not supported"):
        llm_options(model)


def test_a_port_that_is_none_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "m", "--port", "70000"]) == 2
    assert "give a number from 1 to 65535" in capsys.readouterr().err


def test_an_interrupted_server_was_stopped_and_nothing_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(model: str, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cs_localize.serving.serve", interrupted)
    assert main(["serve", "--model", "m"]) == 130
    assert capsys.readouterr().err == "cs-localize: the server was stopped\n"
