"""The scoring server over the torch engine, in this process. Needs the extra practicum[serve]."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import torch

from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError, MissingExtraError
from practicum.models.adapter_rows import put_adapters
from practicum.models.load_model import load_model
from practicum.recipe.schema.recipe import Model
from practicum.serving.completions import RequestScorer, models_body
from practicum.serving.limits import LimitedApp, Refusal, ServerLimits, error_body
from practicum.serving.serve import Resolved

try:
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from starlette.exceptions import HTTPException

    from practicum.serving.limited_protocol import limited_protocol
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
    if server.adapters:
        distinct = {saved.fingerprint: saved for saved in server.adapters.values()}
        put_adapters(model, distinct, options.model)
    adapters = {name: saved.fingerprint for name, saved in server.adapters.items()}
    # Nothing is generated, so no KV memory is needed: one slot of the least context.
    engine = TorchEngine(model, slots=1, context=2)
    scorer = RequestScorer(engine, server.name, context=server.context, vocab=server.vocab, adapters=adapters)
    folders = {name: str(saved.folder) for name, saved in server.adapters.items()}
    app = make_app(scorer, {server.name: options.model} | folders)
    config = server_config(app, server.limits, options.api_key, verbose=options.verbose)
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


def server_config(
    app: FastAPI, limits: ServerLimits, api_key: str | None, *, verbose: bool = False
) -> uvicorn.Config:
    """A server of the application, for requests within the limits that bring the key."""
    return uvicorn.Config(
        LimitedApp(app, limits, api_key),
        http=limited_protocol(limits),
        ws="none",
        log_level="info" if verbose else "warning",
        access_log=verbose,
        timeout_graceful_shutdown=_GRACE_S,
    )


def make_app(scorer: RequestScorer, roots: Mapping[str, str]) -> FastAPI:
    """The application; it closes the scorer's engine at its end. `roots` are the folders of its models."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        scorer.engine.close()

    app = FastAPI(title="practicum serve", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    since = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(json.dumps(models_body(scorer.name, roots, scorer.context, since)))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        try:
            return _json(await scorer.complete(await request.body()))
        except Refusal as refusal:
            return _error(refusal.status, refusal.message)
        except EngineError as error:
            return _error(500, str(error))

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        return _error(error.status_code, str(error.detail))

    return app


def _json(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    return _json(json.dumps(error_body(status, message)), status)
