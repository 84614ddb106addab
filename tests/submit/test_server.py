from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cs_localize.cli import main
from cs_localize.errors import CsLocalizeError, UsageError
from cs_localize.submit import connect, exit_code
from tests.submit.builders import StubClient, details, server


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 2, 2),
        ("FAILED", 1, 1),
        ("FAILED", 127, 1),
        ("FAILED", -9, 1),
        ("FAILED", None, 1),
        ("STOPPED", None, 1),
    ],
)
def test_the_exit_code_is_that_of_the_command(status: str, code: int | None, expected: int) -> None:
    assert exit_code(details("a", status, code)) == expected


@pytest.mark.parametrize("fault", [{}, {"cut": True}, {"broken": True}])
def test_following_prints_the_log_once_and_ends_with_the_job(fault: dict[str, bool]) -> None:
    client = StubClient({"a": "RUNNING"}, log="found L4H2\nfound L7H0\n", **fault)
    stream = io.StringIO()

    assert server(client).follow("a", stream).status == "SUCCEEDED"
    assert stream.getvalue() == client.log


@contextmanager
def web_server(status: int, body: str) -> Iterator[str]:
    """Something on loopback that gives every question the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def test_an_address_where_nobody_answers_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"

        assert main(["ls", "--address", address]) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"no Ray job server answers at {address}" in error


@pytest.mark.parametrize("address", ["127.0.0.1:8265", "auto", "ray://127.0.0.1:10001"])
def test_an_address_that_is_none_of_a_job_server_says_how_to_write_it(address: str) -> None:
    with pytest.raises(UsageError, match="http://HOST:PORT"):
        connect(address)


@pytest.mark.parametrize(("status", "body"), [(404, ""), (200, "<html>"), (200, "[]"), (200, '{"version": 3}')])
def test_a_server_that_is_none_of_ray_is_one_line(status: int, body: str) -> None:
    with web_server(status, body) as address, pytest.raises(UsageError, match="no Ray job server answers"):
        connect(address)


@pytest.mark.parametrize("address", ["http://127.0.0.1:port", "http://two words"])
def test_an_address_that_no_url_has_is_one_line(address: str) -> None:
    with pytest.raises(UsageError, match="no Ray job server answers"):
        connect(address)


def test_a_server_that_speaks_no_http_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-server\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(UsageError, match="no Ray job server answers"):
            connect(f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize("status", [401, 403])
def test_a_cluster_that_asks_for_a_token_says_how_to_give_it(status: int) -> None:
    with web_server(status, "no token") as address, pytest.raises(UsageError, match="set RAY_AUTH_MODE=token"):
        connect(address)


def test_the_address_that_is_given_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")

    with web_server(200, '{"ray_version": "2.60.0"}') as address:
        assert connect(address).address == address


def test_the_default_address_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")

    assert main(["ls"]) == 2
    assert "http://127.0.0.1:1 " in capsys.readouterr().err


def test_ray_without_its_packages_for_jobs_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.dashboard.modules.job.sdk.requests", None)

    with (
        web_server(200, '{"ray_version": "2.60.0"}') as address,
        pytest.raises(CsLocalizeError, match=r"ray\[default\]"),
    ):
        connect(address)
