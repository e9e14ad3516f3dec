"""The HTTP application of `practicum serve` and the agent endpoint: bodies, keys, errors, the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
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
        return JSONResponse(body, status, headers={"connection": "close"})

    refused = (Refusal, EngineError, HTTPException, ClientDisconnect)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(refused, refuse), **options)


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


def sent_key(request: Request) -> str:
    """Return the key of a request: `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's send."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def make_server(app: Starlette, connections: int | None = CONNECTIONS, **options: Any) -> uvicorn.Server:
    """Create a server that returns 503 while `connections` connections are open."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        limit_concurrency=connections,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        log_level="warning",
        access_log=False,
        **options,
    )
    return uvicorn.Server(config)
