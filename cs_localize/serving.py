"""Ablations through vLLM's own ``LLM`` and through its OpenAI-compatible server.

Both answer like the engine of a study, each request under its own ablation, and every worker checks after each step
that its hooks did all of their work. There are no canaries, and no means of heads.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cs_localize.config import EngineConfig
from cs_localize.errors import UsageError, one_line
from cs_localize.heads import Head, ModelShape, Neuron
from cs_localize.measure.cluster import worker_environment
from cs_localize.measure.sockets import VLLM_FOLDER, check_vllm_sockets, vllm_sockets_fit
from cs_localize.measure.spec import EngineSpec
from cs_localize.measure.vllm.options import worker_options
from cs_localize.measure.vllm.start import check_start, in_one_line
from cs_localize.session import engine_spec
from cs_localize.spelling import read_ablation

_MIDDLEWARE = "cs_localize.measure.vllm.middleware.AblationMiddleware"
_UNSUPPORTED = {
    "speculative_config": None,
    "kv_transfer_config": None,
    "kv_offloading_size": None,
    "enable_dbo": False,
    "pipeline_parallel_size": 1,
}
"""Options of ``vllm serve`` that a worker refuses to start with, and the value of each that it starts with."""


def llm_options(model: str) -> dict[str, Any]:
    """What to give to ``vllm.LLM`` so that requests can be ablated; more options may be added.

    There is no prefix cache: ``LLM`` would share it between ablations.

        llm = LLM(**llm_options("smollm2-135m-instruct"), enforce_eager=True)
        params = SamplingParams(max_tokens=5, extra_args=ablation_args(["L4H2"], model_shape(llm)))

    Every request must name its ablation, also one that wants none.

    Args:
        model: a directory, a hub id or a built-in model name.

    Raises:
        UsageError: if the model or vLLM is not to be had, or the environment asks for vLLM's V2 model runner.
    """
    spec = _prepare(model)
    return {
        "model": spec.model_dir,
        "enable_prefix_caching": False,
        "max_num_seqs": EngineConfig().max_num_seqs,
        **_worker_options(spec, salted=False),
    }


def model_shape(llm: Any) -> ModelShape:  # noqa: ANN401  # a vllm.LLM, which is not imported here
    """The geometry of the model of an ``LLM`` that was made with ``llm_options``."""
    return ModelShape(**llm.llm_engine.vllm_config.additional_config["knockout_shape"])


def ablation_args(heads: Sequence[str | Head | Neuron], shape: ModelShape) -> dict[str, str]:
    """What to give to ``SamplingParams`` as ``extra_args``.

    Args:
        heads: the ablation, such as ``["L4H2", "L7H0=0.5"]``; an empty list is none.
        shape: the model's geometry.

    Raises:
        UsageError: if the ablation is malformed, names what the model lacks, or replaces a head by its mean.
    """
    ablation = read_ablation(heads, shape)
    if ablation.mean_heads:
        raise UsageError(f"{ablation.mean_heads[0]}=mean: an LLM has measured no means; use cs_localize.Engine")
    return {"ablation": ablation.encode()}


def serve(model: str, *, host: str, port: int, eager: bool, arguments: Sequence[str] = ()) -> None:
    """Runs vLLM's OpenAI-compatible server in this process until it is told to end.

    Args:
        model: a directory, a hub id or a built-in model name; clients name it so.
        host: address to listen at.
        port: port to listen at.
        eager: skip compilation.
        arguments: more arguments of ``vllm serve``.

    Raises:
        MeasurementError: if vLLM cannot load the model, or its heads cannot be ablated.
        UsageError: as ``llm_options``, or if the path of the temporary folder is too long for the sockets of vLLM.
    """
    check_vllm_sockets()
    spec = _prepare(model)
    worker = _worker_options(spec, salted=True)
    told = {
        "served-model-name": model,
        "host": host,
        "port": port,
        "max-num-seqs": EngineConfig().max_num_seqs,
        "worker-cls": worker["worker_cls"],
        "additional-config": json.dumps(worker["additional_config"]),
        "middleware": _MIDDLEWARE,
    }
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.exceptions import VLLMClientError
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="vllm")  # type: ignore[no-untyped-call]  # not annotated there
    command.subparser_init(parser.add_subparsers())
    flags = [f"--{name}={value}" for name, value in told.items()]
    options = parser.parse_args(["serve", spec.model_dir, *flags, *(["--enforce-eager"] if eager else []), *arguments])
    _check_untouched(options, worker)
    try:
        command.validate(options)
    except (TypeError, ValueError, VLLMClientError) as error:  # what vLLM raises for options that do not go together
        raise UsageError(one_line(error)) from None
    with _own_sockets(), in_one_line("serve the model"):
        command.cmd(options)


@contextmanager
def _own_sockets() -> Iterator[None]:
    """Has vLLM's processes talk through sockets in a folder of this server's: those that are killed leave them behind.

    Where the user has named a folder, or the path of a socket in ours would be too long, vLLM puts them where it would
    by itself.
    """
    with tempfile.TemporaryDirectory(prefix="cs_localize-") as folder:
        if VLLM_FOLDER in os.environ or not vllm_sockets_fit(folder):
            yield
            return
        os.environ[VLLM_FOLDER] = folder
        try:
            yield
        finally:
            os.environ.pop(VLLM_FOLDER, None)


def _check_untouched(options: argparse.Namespace, worker: Mapping[str, Any]) -> None:
    """Refuses arguments that lead around the worker or the middleware, and those that no worker starts with."""
    if (
        options.worker_cls != worker["worker_cls"]
        or options.additional_config != worker["additional_config"]
        or _MIDDLEWARE not in options.middleware
        or getattr(options, "grpc", False)
        or os.environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0"
    ):
        raise UsageError(
            "the server would answer without ablations; leave --worker-cls, --additional-config, --grpc and "
            "VLLM_USE_RUST_FRONTEND as they are"
        )
    for name, value in _UNSUPPORTED.items():
        if getattr(options, name) != value:
            raise UsageError(f"--{name.replace('_', '-')} is not supported under ablations; leave it out")


def _prepare(model: str) -> EngineSpec:
    """Finds the model, and gives this process the environment that vLLM needs where the user has given none."""
    spec, _ = engine_spec(model, EngineConfig(), ())
    for name, value in worker_environment(spec, len(os.sched_getaffinity(0))).items():
        os.environ.setdefault(name, value)
    check_start()
    return spec


def _worker_options(spec: EngineSpec, salted: bool) -> dict[str, Any]:
    try:
        return worker_options(spec.shape, salted=salted, verified=True)
    except ModuleNotFoundError as error:
        raise UsageError(f"the package '{error.name}' is missing; install cs_localize[cpu] or [gpu]") from None
