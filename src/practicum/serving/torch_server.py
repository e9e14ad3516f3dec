"""The scoring server over the torch engine, in this process. Needs the extra practicum[serve]."""

from __future__ import annotations

import hmac
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch

from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError, MissingExtraError
from practicum.models.load_model import load_model
from practicum.recipe.schema.recipe import Model
from practicum.serving.completions import Completion, Refusal, RequestScorer, error_body, models_body
from practicum.serving.serve import Resolved

try:
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise MissingExtraError("practicum serve with the torch engine", "serve") from error

_GRACE_S = 5
"""Seconds for requests under way when the server ends."""


def serve_torch(server: Resolved, bound: socket.socket, ready: Callable[[], None]) -> None:
    """Load the model and serve it until SIGINT or SIGTERM, which is raised again; `ready` is called once."""
    options = server.options
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    spec = Model(path=options.model, dtype=server.dtype, device=server.device)
    model = load_model(spec, seed=0, key="MODEL")
    # Nothing is generated, so no KV memory is needed: one slot of the least context.
    engine = TorchEngine(model, slots=1, context=2)
    scorer = RequestScorer(engine, server.name, context=server.context, vocab=server.vocab)
    app = make_app(scorer, options.model, options.api_key)
    config = uvicorn.Config(
        app,
        log_level="info" if options.verbose else "warning",
        access_log=options.verbose,
        timeout_graceful_shutdown=_GRACE_S,
    )
    _AnnouncingServer(config, ready).run(sockets=[bound])


class _AnnouncingServer(uvicorn.Server):
    """Calls `ready` when it accepts connections."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def make_app(scorer: RequestScorer, root: str, api_key: str | None = None) -> FastAPI:
    """The application; it closes the scorer's engine at its end. /health asks for no key."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        scorer.engine.close()

    app = FastAPI(title="practicum serve", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    since = int(time.time())

    @app.middleware("http")
    async def admit(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if api_key is not None and request.url.path.startswith("/v1") and not _has_key(request, api_key):
            return _error(401, "the key is missing or wrong: send it as `Authorization: Bearer KEY`")
        return await call_next(request)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> Response:
        return _answer(models_body(scorer.name, root, scorer.context, since))

    @app.post("/v1/completions")
    async def completions(request: Completion) -> Response:
        try:
            return _answer(await scorer.complete(request))
        except Refusal as refusal:
            return _error(refusal.status, refusal.message)
        except EngineError as error:
            return _error(500, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _error(400, "; ".join(map(_sentence, error.errors()[:3])))

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        return _error(error.status_code, str(error.detail))

    return app


def _has_key(request: Request, api_key: str) -> bool:
    sent = request.headers.get("Authorization", "")
    return hmac.compare_digest(sent.encode(), f"Bearer {api_key}".encode())


def _sentence(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"][1:])
    return f"{where}: {problem['msg']}" if where else str(problem["msg"])


def _answer(body: Any) -> Response:
    try:
        # FastAPI would look at each of some 100,000 entries before writing them.
        return Response(json.dumps(body, allow_nan=False), media_type="application/json")
    except ValueError:
        return _error(500, "the model's logprobs are not finite numbers: are its weights good?")


def _error(status: int, message: str) -> Response:
    return Response(json.dumps(error_body(status, message)), status, media_type="application/json")
