"""The routes of the scoring server, over any engine."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from practicum.processes.http_server import Refusal, json_response, make_app, read_body, sent_key
from practicum.serving.completions import RequestScorer


def scoring_app(
    scorer: RequestScorer, roots: Mapping[str, str], max_body: int, api_key: str | None = None
) -> Starlette:
    """Create the application, which closes the scorer's engine when it stops.

    `roots` maps model names to folders. Requests have at most `max_body` bytes, and all except /health need
    the key.
    """
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        scorer.engine.close()

    def check_key(request: Request) -> None:
        if api_key is not None and not hmac.compare_digest(sent_key(request).encode(), api_key.encode()):
            raise Refusal(401, "the key is missing or wrong: send it as `Authorization: Bearer KEY`")

    async def health(_: Request) -> Response:
        return Response()

    async def models(request: Request) -> Response:
        check_key(request)
        entry = {"object": "model", "created": created, "owned_by": "practicum"}
        entry["max_model_len"] = scorer.context
        data = [
            {"id": name, **entry, "root": root, "parent": None if name == scorer.name else scorer.name}
            for name, root in roots.items()
        ]
        return json_response({"object": "list", "data": data})

    async def completions(request: Request) -> Response:
        check_key(request)
        body = await read_body(request, max_body, " (see --max-body-mb)")
        return Response(await scorer.complete(body), media_type="application/json")

    routes = [Route("/health", health), Route("/v1/models", models)]
    routes.append(Route("/v1/completions", completions, methods=["POST"]))
    return make_app(routes, lifespan=lifespan)
