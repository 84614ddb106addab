"""The verb ``serve``: vLLM's OpenAI-compatible server, each request under its own ablation."""

from __future__ import annotations

import argparse
import sys

from cs_localize.errors import UsageError


def add_serve(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the verb to the command line's verbs, the object that ``add_subparsers`` returns."""
    serve = verbs.add_parser("serve", help="vLLM's OpenAI-compatible server, each request under its own ablation")
    serve.add_argument("--model", required=True, help="a directory, a hub id or a built-in model")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="port to listen at (default: %(default)s)")
    serve.add_argument("--compile", action="store_true", help="compile the model: faster steps, a slow start")
    serve.add_argument("vllm", nargs="*", metavar="-- VLLM_ARGUMENT", help="more arguments of 'vllm serve'")
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from cs_localize.serving import serve

    if not 0 < arguments.port < 65536:
        raise UsageError(f"--port {arguments.port}: give a number from 1 to 65535")
    try:
        serve(
            arguments.model,
            host=arguments.host,
            port=arguments.port,
            eager=not arguments.compile,
            arguments=arguments.vllm,
        )
    except KeyboardInterrupt:
        print("cs-localize: the server was stopped", file=sys.stderr)
        return 130
    return 0
