"""Clients that send too much or nonsense are refused, and others are answered."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.engines.engines import tiny
from tests.serving.servers import MAX_BODY, Served, served

HONEST = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
CONNECTIONS = 16


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny(), connections=CONNECTIONS) as server:
        yield server


def connect(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def header(*lines: str) -> bytes:
    return "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def status_of(server: Served, first: bytes, more: Iterable[bytes] = ()) -> int:
    """Return the status of the response to what is sent piece by piece, as far as the server reads."""
    with connect(server) as connection:
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(first)
            for piece in more:
                connection.sendall(piece)
        return int(connection.recv(65536).split()[1])


def is_served(server: Served) -> bool:
    return httpx2.post(f"{server.url}/completions", json=HONEST, timeout=30).is_success


def peak_bytes() -> int:
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


@pytest.mark.parametrize(
    ("head", "pieces"),
    [
        (f"Content-Length: {80 * MAX_BODY}", ()),
        ("Transfer-Encoding: chunked", repeat(b"100000\r\n" + bytes(1 << 20) + b"\r\n", 80)),
    ],
    ids=["declared", "chunked"],
)
def test_a_large_body_is_refused_and_never_held(server: Served, head: str, pieces: Iterable[bytes]):
    assert is_served(server)
    before = peak_bytes() if Path("/proc/self/status").exists() else None
    with suppress(ConnectionResetError):  # the response may be lost to a client that still sends
        assert status_of(server, header(head), pieces) == 413
    assert before is None or peak_bytes() - before < 16 * MAX_BODY
    padded = json.dumps(HONEST).encode().ljust(MAX_BODY)
    assert httpx2.post(f"{server.url}/completions", content=padded, timeout=30).is_success


def test_a_body_that_does_not_arrive_in_time_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("practicum.processes.http_server.BODY_S", 0.2)
    with served(tiny()) as server:
        assert status_of(server, header("Content-Length: 100") + b"{") == 408


def test_too_many_connections_are_refused_until_some_close(server: Served):
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(connect(server)).sendall(header("Content-Length: 100"))
        response = httpx2.post(f"{server.url}/completions", json=HONEST, timeout=30)
        assert response.status_code == 503
    assert any(is_served(server) for _ in range(100))


def test_a_stranger_is_refused_before_the_body_is_read():
    with served(tiny(), api_key="s3cret") as server:
        assert status_of(server, header("Content-Length: 100", "Authorization: Bearer s3cre")) == 401
        assert httpx2.get(f"{server.url}/models").status_code == 401


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": ' + b"[" * 500_000,
        b'{"prompt": [5], "max_tokens": 0, "x": ' + b"[" * 500_000,
        b'{"prompt": [NaN]}',
        b'{"prompt": [5], "temperature": 1e999}',
        b'{"prompt": [' + b"9" * 100_000 + b"]}",
        b'{"prompt": [5], "prompt_logprobs": 99999999999999999999}',
        b'{"prompt": [5], "model": "\\ud800"}',
        b'{"prompt": [5], "model": "\xff\xfe"}',
        b'{"prompt": ["' + b'a","' * 200_000 + b'"]}',
        b"[1, 2]",
        b"",
    ],
    ids=range(11),
)
def test_nonsense_is_refused_with_a_short_message(server: Served, content: bytes):
    response = httpx2.post(f"{server.url}/completions", content=content, timeout=30)
    assert response.status_code == 400, response.text
    assert 5 < len(response.json()["error"]["message"]) < 500
    assert is_served(server)


def test_a_long_name_is_not_sent_back_whole(server: Served):
    asked: dict[str, Any] = HONEST | {"model": "x" * 500_000}
    response = httpx2.post(f"{server.url}/completions", json=asked, timeout=30)
    assert response.status_code == 404
    assert len(response.text) < 1000
