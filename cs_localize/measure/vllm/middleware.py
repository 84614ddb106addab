"""Between vLLM's OpenAI-compatible server and its clients: no request reaches the model without its ablation.

A worker that meets a request without one, or with one that the model cannot have, ends the engine for everybody. So
each is read here. What is wrong is answered with status 400. What is right goes on in the form the worker reads, with a
cache salt, since keys and values depend on the ablation. Where the server has an API key, nothing is read of a request
without it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.vllm.options import WORKER
from cs_localize.spelling import read_ablation

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

_ANSWERED = ("/v1/completions", "/v1/chat/completions")
_UNABLATED = ("/tokenize", "/detokenize")  # the model has no part in them


class AblationMiddleware:
    """Reads ``vllm_xargs.ablation``, a list such as ``["L4H2", "L7H0=0.5"]``, of every request; ``[]`` is none.

    Everything else that could reach the model is refused. vLLM puts a middleware it is given around its own, so its
    check of the API key stands here once more, before a body is read.
    """

    def __init__(self, app: _App) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """One connection, as the ASGI standard hands it over."""
        keys = _api_keys(scope["app"].state.args) if scope["type"] == "http" else []
        if not keys:
            await self._answer(scope, receive, send)
            return
        from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

        await AuthenticationMiddleware(self._answer, keys)(scope, receive, send)

    async def _answer(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in _UNABLATED:
            await self._app(scope, receive, send)
            return
        try:
            if path not in _ANSWERED:
                raise UsageError(f"{path} is not served under ablations; use {' or '.join(_ANSWERED)}")
            body = ablated_body(await _read(receive), _served_shape(scope["app"].state.vllm_config))
        except UsageError as error:
            await _refuse(send, str(error))
            return
        await self._app(_with_length(scope, len(body)), _replay(body, receive), send)


def ablated_body(body: bytes, shape: ModelShape) -> bytes:
    """The body of a completion request as vLLM is to read it.

    Args:
        body: as the client sent it.
        shape: geometry of the served model.

    Raises:
        UsageError: if it names no ablation, or one that is malformed or that the model cannot have.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise UsageError("the request is not JSON, or nested too deeply") from None
    if not isinstance(fields, dict):
        raise UsageError("the request is not a JSON object")
    extra = fields.get("vllm_xargs")
    if not isinstance(extra, dict) or not isinstance(extra.get("ablation"), list):
        raise UsageError('name the ablation as "vllm_xargs": {"ablation": ["L4H2", "L7H0=0.5"]}; [] is none')
    ablation = read_ablation(extra["ablation"], shape)
    if ablation.mean_heads:
        raise UsageError(f"{ablation.mean_heads[0]}=mean: a server has measured no means; give a factor")
    if fields.get("use_beam_search"):
        raise UsageError("beam search is not served under ablations")
    if "gold" in extra:  # which a worker would take for an answer that the engine of a study wants scored
        raise UsageError("vllm_xargs.gold: a server scores no answers; leave it out")
    fields["vllm_xargs"] = {**extra, "ablation": ablation.encode()}
    fields["cache_salt"] = _salt(fields.get("cache_salt"), ablation)
    return json.dumps(fields).encode()


def _api_keys(arguments: Any) -> list[str]:  # noqa: ANN401  # the argparse.Namespace of ``vllm serve``
    """The keys of which vLLM asks for one: those of ``--api-key``, else of the environment."""
    return [key for key in arguments.api_key or [os.environ.get("VLLM_API_KEY")] if key]


def _served_shape(vllm_config: Any) -> ModelShape:  # noqa: ANN401  # importing vLLM here would slow every command
    """The geometry of the served model, if this server's workers ablate and its prefix cache waits for salts."""
    told = vllm_config.additional_config
    if vllm_config.parallel_config.worker_cls != WORKER or not told.get("knockout_salted"):
        raise UsageError("this server was not started by cs-localize serve, so its answers would not be ablated")
    return ModelShape(**told["knockout_shape"])


def _salt(given: object, ablation: Ablation) -> str:
    """What tells cached prefixes apart: the ablation, and what the client asked to tell apart."""
    if given is None:
        return ablation.key
    if not isinstance(given, str) or not given:
        raise UsageError("cache_salt must be text")
    return hashlib.sha256(f"{ablation.key}|{given}".encode()).hexdigest()


async def _read(receive: _Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise UsageError("the client went away")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: _Receive) -> _Receive:
    """Hands over the new body once; what comes after is the client's, who may go away."""
    waiting = [body]

    async def once() -> MutableMapping[str, Any]:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return once


def _with_length(scope: _Scope, length: int) -> _Scope:
    kept = [(k, v) for k, v in scope["headers"] if k.lower() not in (b"content-length", b"transfer-encoding")]
    return {**scope, "headers": [*kept, (b"content-length", str(length).encode())]}


async def _refuse(send: _Send, message: str) -> None:
    error = {"message": message, "type": "BadRequestError", "param": "vllm_xargs", "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
