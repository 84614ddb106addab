"""vLLM's OpenAI-compatible server under ablations: starts it on this machine, asks it, and ends it.

python examples/server.py [MODEL]
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests

PROMPT = "hot -> cold\nbig -> small\nfast -> slow\nup ->"
ABLATIONS: tuple[list[str], ...] = ([], ["L0H0"], ["L0H0=0.5", "L1H2"], [], ["L999H0"])
PATIENCE_S = 300


def main(model: str) -> None:
    """Starts a server, asks it, and ends it."""
    with serving(model) as url:
        ask_all(url, model)


@contextmanager
def serving(model: str, *arguments: str) -> Iterator[str]:
    """Starts a server, says where it is once it answers, and ends it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "cs_localize", "serve", "--model", model, "--port", str(port), "--", *arguments]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait_for(server, f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def ask_all(url: str, model: str) -> None:
    """Asks under every ablation and prints one line each; the model has no head L999H0."""
    for heads in ABLATIONS:
        status, said = ask(url, model, PROMPT, heads)
        line = repr(said["choices"][0]["text"]) if status == requests.codes.ok else said["error"]["message"]
        print(f"{','.join(heads) or 'none':<16} {status}  {line}", flush=True)


def ask(url: str, model: str, prompt: str, heads: list[str], **options: object) -> tuple[int, dict[str, Any]]:
    """The status and the content of the answer under one ablation."""
    asked: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **options}
    asked["vllm_xargs"] = {"ablation": heads}
    answer = requests.post(f"{url}/v1/completions", json=asked, timeout=60)
    return answer.status_code, answer.json()


def _wait_for(server: subprocess.Popen[bytes], health: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            if requests.get(health, timeout=5).ok:
                return
        except requests.ConnectionError:
            time.sleep(0.5)
    raise SystemExit("the server does not answer")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct")
