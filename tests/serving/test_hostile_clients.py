"""Clients that send too much, too slowly or nonsense: each is told so, and others are answered."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx2
import pytest

from practicum.serving.limits import ServerLimits
from tests.engines.engines import tiny
from tests.serving.servers import Served, served

MIB = 1 << 20
LIMITS = ServerLimits(body_bytes=MIB, connections=64, header_s=0.5, body_s=0.5, answer_s=0.5, linger_s=0.3)
HONEST = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny(), limits=LIMITS) as server:
        yield server


def connect(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def header(*lines: str) -> bytes:
    return "\r\n".join(["POST /v1/completions HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def answer(connection: socket.socket) -> tuple[int, str]:
    """Status and sentence of what the server says until it closes the connection."""
    said = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            said += piece
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def told(server: Served, first: bytes, more: Iterable[bytes] = ()) -> tuple[int, str]:
    """The answer to what is sent piece by piece, as far as the server takes it."""
    with connect(server) as connection:
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(first)
            for piece in more:
                connection.sendall(piece)
        return answer(connection)


def honest(server: Served) -> bool:
    """Whether somebody who asks properly is answered."""
    return httpx2.post(f"{server.url}/completions", json=HONEST, timeout=PATIENCE_S).is_success


def peak_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0]) * 1024


def forget_peak() -> bool:
    try:
        return bool(Path("/proc/self/clear_refs").write_text("5"))
    except OSError:
        return False


LARGE = {
    "a length of 80 MB": (header(f"Content-Length: {80 * MIB}"), repeat(bytes(MIB), 80)),
    "chunks without end": (
        header("Transfer-Encoding: chunked"),
        repeat(b"100000\r\n" + bytes(MIB) + b"\r\n"),
    ),
    "a length of which nothing is sent": (header(f"Content-Length: {10**18}"), ()),
    "curl's way to ask first": (header(f"Content-Length: {80 * MIB}", "Expect: 100-continue"), ()),
}


@pytest.mark.parametrize("how", LARGE)
def test_a_large_body_is_refused_while_it_is_sent_and_never_held(server: Served, how: str):
    assert honest(server)
    measured, before = forget_peak(), peak_bytes() if Path("/proc/self/status").exists() else 0
    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(told, server, *LARGE[how])
        assert honest(server)
        status, sentence = attack.result(PATIENCE_S)
    assert (status, sentence) == (
        413,
        "the body is larger than the limit of 1,048,576 bytes (practicum serve --max-body-mb)",
    )
    if measured:
        assert peak_bytes() - before < 16 * MIB


def test_a_body_of_the_limit_is_read(server: Served):
    body = json.dumps(HONEST).encode()
    assert told(server, header(f"Content-Length: {MIB}", "Connection: close"), [b" " * MIB])[0] == 400
    padded = body + b" " * (MIB - len(body))
    assert httpx2.post(f"{server.url}/completions", content=padded, timeout=PATIENCE_S).is_success


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (b"", "the header was not there after 0.5 s"),
        (b"POST /v1/completions HTTP/1.1\r\nHost", "the header was not there after 0.5 s"),
        (header("Content-Length: 100") + b"{", "the body was not there after 0.5 s"),
        (header("Transfer-Encoding: chunked") + b"1\r\n{\r\n", "the body was not there after 0.5 s"),
    ],
)
def test_what_does_not_arrive_in_time_is_refused(server: Served, sent: bytes, sentence: str):
    assert told(server, sent) == (408, sentence)


def test_the_next_request_of_a_connection_has_a_deadline_too(server: Served):
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /heal")
        assert answer(connection) == (408, "the header was not there after 0.5 s")


def test_half_open_connections_leave_room_for_others(server: Served):
    begun = (b"", b"POST /v1/comp", header("Content-Length: 100"), header("Content-Length: 100") + b"{")
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(200)]
        for n, connection in enumerate(connections):
            with suppress(ConnectionResetError, BrokenPipeError):  # it was closed already
                connection.sendall(begun[n % len(begun)])
        assert all(honest(server) for _ in range(3))
        last = [answer(connection) for connection in connections[-8:]]
    assert {status for status, _ in last} <= {408, 503}
    assert all(sentence for _, sentence in last)
    assert honest(server)


def test_clients_that_drip_and_come_back_keep_nobody_from_an_answer(server: Served):
    over, came_back = threading.Event(), [0]
    whole = header(f"Content-Length: {len(json.dumps(HONEST))}") + json.dumps(HONEST).encode()

    def drip(begun: int) -> None:
        """A byte now and then of the request, of which `begun` bytes are sent at once; for ever again."""
        while not over.is_set():
            with connect(server) as connection, suppress(OSError):
                connection.sendall(whole[:begun])
                for byte in whole[begun:-1]:
                    if over.wait(0.05):
                        return
                    connection.sendall(bytes([byte]))
            came_back[0] += 1

    slow = [threading.Thread(target=drip, args=(n % len(whole),)) for n in range(LIMITS.connections + 16)]
    for thread in slow:
        thread.start()
    try:
        answered = 0
        while came_back[0] < 2 * len(slow):
            assert honest(server)
            answered += 1
    finally:
        over.set()
        for thread in slow:
            thread.join(PATIENCE_S)
    assert answered > 5


def test_who_does_not_read_the_answer_is_left(server: Served):
    body = json.dumps(HONEST | {"prompt": [5] * 120, "prompt_logprobs": 63}).encode()
    request = header(f"Content-Length: {len(body)}") + body
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE_S)
        host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
        connection.connect((host, int(port)))
        with pytest.raises((ConnectionResetError, BrokenPipeError)):  # when the server has left
            deque(map(connection.sendall, repeat(request)), maxlen=0)
    assert honest(server)


NONSENSE: dict[str, bytes] = {
    "deep": b'{"prompt": ' + b"[" * 500_000,
    "deep object": b'{"a":' * 150_000,
    "deep where nothing is read": b'{"prompt": [5], "max_tokens": 0, "x": ' + b"[" * 500_000,
    "not a number": b'{"prompt": [NaN]}',
    "a temperature that is none": b'{"prompt": [5], "temperature": NaN}',
    "infinite": b'{"prompt": [5], "temperature": 1e999}',
    "a long number": b'{"prompt": [' + b"9" * 100_000 + b"]}",
    "a large number": b'{"prompt": [5], "prompt_logprobs": 99999999999999999999}',
    "a lone surrogate": b'{"prompt": [5], "model": "\\ud800"}',
    "no UTF-8": b'{"prompt": [5], "model": "\xff\xfe"}',
    "many of a wrong type": b'{"prompt": ["' + b'a","' * 250_000 + b'"]}',
    "a wrong type": b'{"prompt": {"5": 6}}',
    "no object": b"[1, 2]",
    "nothing": b"",
    "half": b'{"prompt": [5, 6',
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_refused_with_a_short_sentence(server: Served, what: str):
    got = httpx2.post(f"{server.url}/completions", content=NONSENSE[what], timeout=PATIENCE_S)
    assert got.status_code == 400, got.text
    sentence = got.json()["error"]["message"]
    assert 5 < len(sentence) < 500
    assert honest(server)


def test_a_long_name_is_not_sent_back_whole(server: Served):
    asked: dict[str, Any] = HONEST | {"model": "x" * 500_000}
    got = httpx2.post(f"{server.url}/completions", json=asked, timeout=PATIENCE_S)
    assert got.status_code == 404
    assert len(got.text) < 1000


@pytest.mark.parametrize("sent", [b"\0" * 1000, b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"])
def test_no_http_is_refused(server: Served, sent: bytes):
    with connect(server) as connection:
        connection.sendall(sent)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    assert honest(server)


def test_a_header_without_end_is_refused(server: Served):
    with connect(server) as connection:
        with suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            for _ in range(10_000):
                connection.sendall(b"X-More: " + b"x" * 1000 + b"\r\n")
        with suppress(ConnectionResetError):
            assert connection.recv(65536).startswith(b"HTTP/1.1 400")
    assert honest(server)


def test_a_stranger_is_refused_before_the_body_is_read():
    with served(tiny(), limits=LIMITS, api_key="s3cret") as server:
        begun = header("Content-Length: 100", "Authorization: Bearer s3cre")
        assert told(server, begun)[0] == 401
        asked = httpx2.get(f"{server.url.removesuffix('/v1')}/nothing")
        assert asked.status_code == 401, "no path tells a stranger anything"
