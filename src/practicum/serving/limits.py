"""What a client may ask of a server, before any of its request is looked at: key, size, time.

`LimitedApp` stands before the torch server's application and, as `VllmLimits`, before vLLM's. The deadline of
headers and the number of connections are in `limited_protocol`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LIMITS_ENV = "PRACTICUM_SERVER_LIMITS"
MOST_CONNECTIONS = 256
_MIB = 1 << 20
_TOKEN_BYTES = 32
"""Bytes of a request for each token of the context: a token id takes up to 8, text may be escaped."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What clients may take: bytes of a body, connections at once, seconds until a request is there."""

    body_bytes: int
    connections: int = MOST_CONNECTIONS
    header_s: float = 10.0
    body_s: float = 30.0
    answer_s: float = 30.0
    """Seconds in which a client must read on in an answer."""
    linger_s: float = 2.0
    """Seconds in which the rest of a refused body is thrown away."""

    def environment(self) -> dict[str, str]:
        """Variables from which `limits_of_environment` makes the same."""
        return {LIMITS_ENV: json.dumps(asdict(self))}


def limits_of_environment() -> ServerLimits:
    """The limits that this process was started with."""
    return ServerLimits(**json.loads(os.environ[LIMITS_ENV]))


def default_body_bytes(context: int) -> int:
    """Room for a prompt of the whole context, and at least 1 MiB."""
    return max(_MIB, _TOKEN_BYTES * context)


class Refusal(Exception):
    """A request that can't be met: a status and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(message)


def error_body(status: int, message: str) -> Any:
    """A refusal in OpenAI's form."""
    return {"error": {"message": message, "type": "error", "param": None, "code": status}}


class LimitedApp:
    """An ASGI application that gets only whole requests of clients with the key, within the limits.

    /health asks for no key. A body is counted while it is read; what is too much of it is not kept.
    """

    def __init__(self, app: App, limits: ServerLimits, api_key: str | None = None) -> None:
        self.app, self.limits, self.api_key = app, limits, api_key

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _Body(receive)
        try:
            self._check_header(scope)
            async with asyncio.timeout(self.limits.body_s):
                content = await body.read(self.limits.body_bytes)
        except TimeoutError:
            message = f"the body was not there after {self.limits.body_s:g} s"
            await self._refuse(Refusal(408, message), body, send)
        except Refusal as refusal:
            await self._refuse(refusal, body, send)
        else:
            if content is not None:
                await self.app(scope, _again(content, receive), send)

    def _check_header(self, scope: Message) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self.api_key is not None and scope["path"] != "/health":
            sent = headers.get(b"authorization", b"")
            if not hmac.compare_digest(sent, f"Bearer {self.api_key}".encode()):
                raise Refusal(401, "the key is missing or wrong: send it as `Authorization: Bearer KEY`")
        # What is no number here was refused by the protocol.
        if int(headers.get(b"content-length", b"0")) > self.limits.body_bytes:
            raise too_large(self.limits.body_bytes)

    async def _refuse(self, refusal: Refusal, body: _Body, send: Send) -> None:
        """Answer and close, after a moment: closed at once, a client that still sends may lose the answer."""
        content = json.dumps(error_body(refusal.status, refusal.message)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.linger_s):
                async for _ in body.pieces():
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class VllmLimits(LimitedApp):
    """The same as middleware of vLLM's server, which makes it of the application alone.

    vLLM asks for its key below /v1 and a few other paths; this one does for all but /health.
    """

    def __init__(self, app: App) -> None:
        super().__init__(app, limits_of_environment(), os.environ.get("VLLM_API_KEY"))


def too_large(most: int) -> Refusal:
    """The refusal of a body of more than this many bytes."""
    message = f"the body is larger than the limit of {most:,} bytes (practicum serve --max-body-mb)"
    return Refusal(413, message)


class _Body:
    """The body of a request as it arrives."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._ended = receive, False

    async def pieces(self) -> AsyncIterator[bytes | None]:
        """Its pieces; None if the client has left."""
        while not self._ended:
            message = await self._receive()
            if message["type"] != "http.request":
                self._ended = True
                yield None
                return
            self._ended = not message.get("more_body", False)
            yield message.get("body", b"")

    async def read(self, most: int) -> bytes | None:
        """All of it, or None if the client has left; a Refusal as soon as it is more than `most` bytes."""
        kept = bytearray()
        async for piece in self.pieces():
            if piece is None:
                return None
            if len(kept) + len(piece) > most:
                raise too_large(most)
            kept += piece
        return bytes(kept)


def _again(content: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, then what comes after it."""
    whole: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def next_message() -> Message:
        return whole.pop() if whole else await receive()

    return next_message
