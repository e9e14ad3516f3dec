"""A server over the torch engine, in this process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch

from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import MissingExtraError
from practicum.models.load_model import load_model
from practicum.recipe.schema.recipe import Model
from practicum.serving.options import Resolved
from practicum.serving.score_requests import RequestScorer

try:
    import uvicorn

    from practicum.serving.app import make_app
except ImportError as error:
    raise MissingExtraError("practicum serve with the torch engine", "serve") from error

_GRACE_S = 5
"""Seconds that requests under way have at the end."""


def serve_torch(what: Resolved, bound: socket.socket, ready: Callable[[], None]) -> None:
    """Load the model and serve it until SIGINT or SIGTERM, which is raised again; `ready` is called once."""
    options = what.options
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    spec = Model(path=options.model, dtype=what.dtype, device=what.device)
    model = load_model(spec, seed=0, key="MODEL")
    # Nothing is generated, so no KV memory is needed: one slot of the least context.
    engine = TorchEngine(model, slots=1, context=2)
    scorer = RequestScorer(engine, what.name, context=what.context, vocab=what.vocab)
    app = make_app(scorer, options.model, options.api_key)
    config = uvicorn.Config(
        app,
        log_level="info" if options.verbose else "warning",
        access_log=options.verbose,
        timeout_graceful_shutdown=_GRACE_S,
    )
    _Server(config, ready).run(sockets=[bound])


class _Server(uvicorn.Server):
    """Says when it accepts connections."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()
