"""The HTTP application of the scoring server, over any engine. Needs the extra practicum[serve]."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from practicum.errors import EngineError, MissingExtraError
from practicum.serving.completions import Refusal, RequestScorer

try:
    import uvicorn
    from fastapi import Depends, FastAPI, Request, Response
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
except ImportError as error:
    raise MissingExtraError("practicum serve", "serve") from error

CONNECTIONS = 256
"""Default limit of open connections."""
BODY_S = 30.0
"""Seconds in which a request's body must arrive."""
_KEEP_ALIVE_S = 30
_SHUTDOWN_S = 5
"""Seconds for requests in flight when the server stops."""


def make_app(
    scorer: RequestScorer, roots: Mapping[str, str], max_body: int, api_key: str | None = None
) -> FastAPI:
    """Return the application, which closes the scorer's engine when it stops.

    `roots` are the folders of the models by their names. Requests have at most `max_body` bytes, and all but
    /health bring the key.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        scorer.engine.close()

    def check_key(request: Request) -> None:
        sent = request.headers.get("authorization", "").encode()
        if api_key is not None and not hmac.compare_digest(sent, f"Bearer {api_key}".encode()):
            raise Refusal(401, "the key is missing or wrong: send it as `Authorization: Bearer KEY`")

    app = FastAPI(title="practicum serve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    created, with_key = int(time.time()), [Depends(check_key)]

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models", dependencies=with_key)
    async def models() -> Response:
        entry = {"object": "model", "created": created, "owned_by": "practicum"}
        entry["max_model_len"] = scorer.context
        data = [
            {"id": name, **entry, "root": root, "parent": None if name == scorer.name else scorer.name}
            for name, root in roots.items()
        ]
        return JSONResponse({"object": "list", "data": data})

    @app.post("/v1/completions", dependencies=with_key)
    async def completions(request: Request) -> Response:
        body = await read_body(request, max_body)
        return Response(await scorer.complete(body), media_type="application/json")

    @app.exception_handler(Refusal)
    @app.exception_handler(EngineError)
    @app.exception_handler(HTTPException)
    @app.exception_handler(ClientDisconnect)
    async def refuse(_: Request, error: Exception) -> Response:
        status, message = getattr(error, "status_code", 500), str(getattr(error, "detail", error))
        body = {"error": {"message": message, "type": "error", "param": None, "code": status}}
        # The rest of a body that was not read must not be taken for the next request.
        return JSONResponse(body, status, headers={"connection": "close"})

    return app


async def read_body(request: Request, max_body: int) -> bytes:
    """Return the body. One that is too large is refused while it arrives and is never held."""
    body = bytearray()
    # uvicorn has already refused a content-length that is not a number.
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
        raise Refusal(413, f"the body is larger than {max_body:,} bytes (see --max-body-mb)")
    return bytes(body)


def make_server(app: FastAPI, connections: int = CONNECTIONS) -> uvicorn.Server:
    """Return a server that answers 503 while `connections` connections are open."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        limit_concurrency=connections,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        log_level="warning",
        access_log=False,
    )
    return uvicorn.Server(config)
