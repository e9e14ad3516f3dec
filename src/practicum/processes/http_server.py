"""The HTTP application of `practicum serve` and the agent endpoint: bodies, keys, errors, the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from practicum.errors import EngineError

CONNECTIONS = 256
"""Default maximum of open connections."""
BODY_S = 30.0
"""Deadline of a request's body in seconds."""
_KEEP_ALIVE_S = 30
_SHUTDOWN_S = 5
"""Seconds that requests in flight may take when the server stops."""


class Refusal(Exception):
    """A rejected request, with an HTTP status and a machine-readable code."""

    def __init__(self, status_code: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status_code, self.code = status_code, code


def openai_error(request: Request, status: int, message: str, code: str | None) -> dict[str, Any]:
    """Return an error body in the format of OpenAI and vLLM."""
    return {"error": {"message": message, "type": "error", "param": None, "code": code or status}}


def make_app(
    routes: Sequence[BaseRoute],
    write_error: Callable[[Request, int, str, str | None], dict[str, Any]] = openai_error,
    **options: Any,
) -> Starlette:
    """Create the application of these routes. `write_error` formats the body of a Refusal."""

    async def refuse(request: Request, error: Exception) -> Response:
        status, message = getattr(error, "status_code", 500), str(getattr(error, "detail", error))
        body = write_error(request, status, message, getattr(error, "code", None))
        # The unread rest of a body must not be parsed as the next request.
        return json_response(body, status, {"connection": "close"})

    refused = (Refusal, EngineError, HTTPException, ClientDisconnect)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(refused, refuse), **options)


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response in ASCII: texts of requests may have surrogates, which UTF-8 can't encode."""
    return Response(json.dumps(data), status, headers, "application/json")


async def read_body(request: Request, max_body: int, advice: str = "") -> bytes:
    """Read the body. One that is too large is rejected while it arrives."""
    body = bytearray()
    # uvicorn has already rejected a content-length that is not a number.
    size = int(request.headers.get("content-length", "0"))
    try:
        async with asyncio.timeout(BODY_S):
            if size <= max_body:
                async for piece in request.stream():
                    body += piece
                    if len(body) > max_body:
                        break
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {BODY_S:g} s") from None
    if max(size, len(body)) > max_body:
        raise Refusal(413, f"the body is larger than {max_body:,} bytes{advice}")
    return bytes(body)


def has_left(request: Request) -> bool:
    """Return True if the client of a request, whose body was read, has disconnected."""
    # One step of the coroutine, which ends if a message is there: `is_disconnected` takes 0.1 ms more.
    step = request.receive().__await__()
    try:
        next(step)
    except StopIteration as arrived:
        return arrived.value["type"] == "http.disconnect"
    step.close()
    return False


def sent_key(request: Request) -> str:
    """Return the key of a request: `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's send."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def make_server(app: Starlette, connections: int | None = CONNECTIONS, **options: Any) -> uvicorn.Server:
    """Create a server that returns 503 while `connections` connections are open."""
    config = uvicorn.Config(
        app,
        ws="none",
        limit_concurrency=connections,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        log_level="warning",
        access_log=False,
        **options,
    )
    return uvicorn.Server(config)
