from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from cs_localize.errors import MeasurementError, UsageError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.vllm.middleware import AblationMiddleware, ablated_body
from cs_localize.measure.vllm.options import WORKER, read_options

SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=3, ffn=5)
Message = MutableMapping[str, Any]


def rewritten(heads: object, **fields: object) -> dict[str, Any]:
    body = {"prompt": "x", "vllm_xargs": {"ablation": heads, "other": 1}, **fields}
    found: dict[str, Any] = json.loads(ablated_body(json.dumps(body).encode(), SHAPE))
    return found


def scope(
    path: str = "/v1/completions", method: str = "POST", worker: str = WORKER, keys: Sequence[str] = ()
) -> dict[str, Any]:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=worker),
        additional_config={"knockout_shape": asdict(SHAPE), "knockout_salted": True},
    )
    app = SimpleNamespace(state=SimpleNamespace(vllm_config=config, args=SimpleNamespace(api_key=list(keys))))
    headers = [(b"Content-Length", b"3"), (b"authorization", b"x")]
    return {"type": "http", "method": method, "path": path, "headers": headers, "app": app}


def served(asked: dict[str, Any], *parts: bytes) -> tuple[dict[str, Any] | None, list[Message]]:
    """What reaches the server (its scope, with the body), and what goes back to the client instead."""
    reached: list[dict[str, Any]] = []
    sent: list[Message] = []
    waiting: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    waiting.append({"type": "http.request", "body": b""})

    async def receive() -> Message:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Message, receive: Any, send: Any) -> None:  # noqa: ANN401  # whatever ASGI says
        message = await receive()
        reached.append({**scope, "body": message["body"], "then": (await receive())["type"]})

    asyncio.run(AblationMiddleware(app)(asked, receive, send))
    return (reached[0] if reached else None), sent


async def unread(asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and content of the answer to a request whose body nobody may want."""
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Message, receive: Any, send: Any) -> None:  # noqa: ANN401  # whatever ASGI says
        raise AssertionError("the request went on")

    await AblationMiddleware(app)(asked, receive, send)
    start, content = sent
    return start["status"], json.loads(content["body"])


def test_the_ablation_goes_on_in_its_canonical_form_and_the_rest_as_it_was() -> None:
    found = rewritten(["L1H2=0.5", "L0G1"], temperature=0)
    assert found == {
        "prompt": "x",
        "temperature": 0,
        "vllm_xargs": {"ablation": "L0H2,L0H3,L1H2=0.5", "other": 1},
        "cache_salt": Ablation.decode("L0H2,L0H3,L1H2=0.5").key,
    }
    assert rewritten([])["vllm_xargs"]["ablation"] == ""


def test_salts_differ_between_ablations_and_between_what_clients_keep_apart() -> None:
    salts = [
        rewritten(heads, **fields)["cache_salt"]
        for heads in ([], ["L0H0"], ["L0H0=0.5"])
        for fields in ({}, {"cache_salt": "mine"}, {"cache_salt": "yours"})
    ]
    assert len(set(salts)) == len(salts)
    assert rewritten(["L0H0", "L1H1"])["cache_salt"] == rewritten(["L1H1", "L0H0=0"])["cache_salt"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "not a JSON object"),
        (b'{"prompt": "x"}', "name the ablation as"),
        (b'{"vllm_xargs": {"ablations": []}}', "name the ablation as"),
        (b'{"vllm_xargs": {"ablation": "L0H0"}}', "name the ablation as"),
        (b'{"vllm_xargs": {"ablation": ["L2H0"]}}', "L2H0 is out of range: this model has layers 0..1"),
        (b'{"vllm_xargs": {"ablation": ["L0N5"]}}', "L0N5 is out of range"),
        (b'{"vllm_xargs": {"ablation": ["L0H0=mean"]}}', "a server has measured no means"),
        (b'{"vllm_xargs": {"ablation": [""]}}', "'' is not a head"),
        (b'{"vllm_xargs": {"ablation": [7]}}', "7 is not a head"),
        (b'{"vllm_xargs": {"ablation": []}, "use_beam_search": true}', "beam search is not served"),
        (b'{"vllm_xargs": {"ablation": [], "gold": [1, 2]}, "prompt_logprobs": 0}', "a server scores no answers"),
        (b'{"vllm_xargs": {"ablation": []}, "cache_salt": 3}', "cache_salt must be text"),
    ],
)
def test_what_cannot_be_ablated_is_a_400_with_one_line_and_reaches_nobody(body: bytes, message: str) -> None:
    reached, (start, content) = served(scope(), body)
    assert reached is None
    assert start["status"] == 400
    said = json.loads(content["body"])["error"]["message"]
    assert message in said
    assert "\n" not in said


def test_a_right_request_reaches_the_server_once_and_whole() -> None:
    body = b'{"vllm_xargs": {"ablation": ["L0H0"]}}'
    reached, sent = served(scope("/v1/chat/completions"), body[:9], body[9:])
    assert reached is not None
    assert json.loads(reached["body"])["vllm_xargs"] == {"ablation": "L0H0"}
    length = str(len(reached["body"])).encode()
    assert reached["headers"] == [(b"authorization", b"x"), (b"content-length", length)]
    assert reached["then"] == "http.disconnect"
    assert sent == []


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/inference/v1/generate", "/v1/completions/"])
def test_other_ways_to_the_model_are_refused(path: str) -> None:
    reached, (start, _) = served(scope(path), b'{"vllm_xargs": {"ablation": []}}')
    assert (reached, start["status"]) == (None, 400)


def test_websockets_are_closed() -> None:
    assert served({"type": "websocket", "path": "/v1/realtime"}) == (None, [{"type": "websocket.close", "code": 1008}])


@pytest.mark.parametrize("asked", [scope("/health", "GET"), scope("/tokenize"), {"type": "lifespan"}])
def test_what_does_not_ask_the_model_passes_untouched(asked: dict[str, Any]) -> None:
    reached, sent = served(asked, b"abc")
    assert reached is not None
    assert (reached["body"], sent) == (b"abc", [])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("authorization", [None, b"", b"right", b"Bearer wrong", b"Bearer right ", b"Basic right"])
def test_without_the_key_of_the_server_not_a_byte_is_read(path: str, authorization: bytes | None) -> None:
    asked = scope(path, keys=["right", "other"])
    asked["headers"] = [] if authorization is None else [(b"authorization", authorization)]
    assert asyncio.run(unread(asked)) == (401, {"error": "Unauthorized"})


@pytest.mark.parametrize("key", ["right", "other"])
def test_with_one_of_the_keys_the_request_goes_on(key: str) -> None:
    asked = scope(keys=["right", "other"])
    asked["headers"] = [(b"authorization", f"Bearer {key}".encode())]
    reached, sent = served(asked, b'{"vllm_xargs": {"ablation": []}}')
    assert (reached is not None, sent) == (True, [])


def test_the_key_of_the_environment_is_asked_for_where_no_option_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right")
    _, (start, _) = served(scope(), b"{}")
    _, (other, _) = served(scope(keys=["x"]) | {"headers": [(b"authorization", b"Bearer x")]}, b"{}")
    assert (start["status"], other["status"]) == (401, 400)


def test_a_server_with_another_worker_answers_nothing() -> None:
    reached, (start, content) = served(scope(worker="vllm.SomeWorker"), b'{"vllm_xargs": {"ablation": []}}')
    assert (reached, start["status"]) == (None, 400)
    assert b"not started by cs-localize serve" in content["body"]


@pytest.mark.parametrize(
    ("told", "prefix_cache", "message"),
    [
        ({}, False, "started without its options"),
        ("", False, "started without its options"),
        ({"knockout_shape": {}, "knockout_salted": False}, True, "set enable_prefix_caching=False"),
    ],
)
def test_a_worker_does_not_start_without_its_options_or_with_a_shared_cache(
    told: object, prefix_cache: bool, message: str
) -> None:
    with pytest.raises(MeasurementError, match=message):
        read_options(told, prefix_cache)


def test_no_ablation_is_not_the_same_as_none_named() -> None:
    with pytest.raises(UsageError, match="name the ablation"):
        ablated_body(b'{"vllm_xargs": {}}', SHAPE)
