"""The web application of the viewer: static files, the runs as JSON, and news as server-sent events.

Only this machine may ask, only with the token, and only pages of this server: the name in `Host` is checked
(a foreign name that leads here is refused), so is `Origin`, and the page may load nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from practicum.errors import PracticumError
from practicum.observe.records.compare_runs import compare_runs
from practicum.observe.view.run_view import RunView

LOCAL = ("127.0.0.1", "localhost")
LOOK_EVERY_S = 0.5
"""How often the sizes of the files are looked at while a page is open: another process writes them."""
BEAT_EVERY_S = 10.0
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATIC = files("practicum.observe.view") / "static"
SUFFIXES = (".js", ".css", ".html", ".svg")


class Guard:
    """Refuses requests from other names, other origins and without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (self.app if refusal is None else _sentence(*refusal))(scope, receive, send)

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host.partition(":")[0] not in LOCAL:
            return 403, "practicum view answers to 127.0.0.1 and localhost alone."
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "Pages of other origins may not ask practicum view."
        sent = (
            request.query_params.get("token")
            or request.headers.get("x-practicum-token")
            or request.cookies.get(cookie_name(request))
            or ""
        )
        if not hmac.compare_digest(sent.encode(), self.token.encode()):
            return 401, "The token is missing or wrong: open the address that practicum view has printed."
        return None


def cookie_name(request: Request) -> str:
    """Return the cookie's name. Cookies are shared by all ports of a machine: each port has another name."""
    return f"practicum_view_{request.url.port or 80}"


def make_app(runs: Sequence[RunView], token: str, is_ending: Callable[[], bool]) -> Starlette:
    """Return the application over these runs. `is_ending` is True once open pages should disconnect."""
    by_id = {run.id: run for run in runs}

    def run_named(name: str) -> RunView:
        if name not in by_id:
            raise HTTPException(404, f"No run {name!r} was given to practicum view.")
        return by_id[name]

    async def page(request: Request) -> Response:
        response = static("index.html")
        response.set_cookie(cookie_name(request), token, httponly=True, samesite="strict", path="/")
        return response

    async def events(request: Request) -> Response:
        return StreamingResponse(news(runs, is_ending), media_type="text/event-stream", headers=HEADERS)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        nothing = f"practicum view has nothing at {request.url.path}."
        return _sentence(error.status_code, error.detail if "practicum" in error.detail else nothing)

    def first(request: Request) -> Any:
        return {"runs": list(by_id), "info": by_id.get(request.query_params.get("run", ""), runs[0]).info()}

    def diff(request: Request) -> Any:
        pair = [run_named(request.query_params.get(side, "")).path for side in ("a", "b")]
        found = compare_runs(pair[0], pair[1])
        return asdict(found) | {"runs": None, "sentence": found.sentence}

    def about_run(ask: Callable[..., Any]) -> Callable[[Request], Any]:
        def answer(request: Request) -> Any:
            query, at = request.query_params, dict(request.path_params)
            kind = "eval" if query.get("kind") == "eval" else "samples"
            return ask(run_named(at.pop("run")), kind, at, query)

        return answer

    asked = {"/api/first": first, "/api/diff": diff}
    asked |= {f"/api/run/{{run}}{path}": about_run(ask) for path, ask in ASKED.items()}
    return Starlette(
        routes=[
            Route("/", page),
            Route("/static/{name:path}", lambda request: static(request.path_params["name"])),
            Route("/api/events", events),
            *(Route(path, _answered(ask)) for path, ask in asked.items()),
        ],
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={HTTPException: refused},
    )


ASKED: Mapping[str, Callable[[RunView, str, Mapping[str, int], QueryParams], Any]] = {
    "": lambda run, kind, at, query: run.info(),
    "/series": lambda run, kind, at, query: run.series(
        query.getlist("name"), float(query.get("first", "-inf")), float(query.get("last", "inf"))
    ),
    "/rows": lambda run, kind, at, query: run.rows(kind, int(query.get("after", 0))),
    "/texts": lambda run, kind, at, query: run.texts(kind, [int(row) for row in query.getlist("row")]),
    "/search": lambda run, kind, at, query: run.search(kind, query["q"]),
    "/newest": lambda run, kind, at, query: run.newest_group(),
    "/group/{step:int}/{prompt:int}": lambda run, kind, at, query: run.group(kind, *at.values()),
    "/session/{step:int}/{prompt:int}/{session:int}": lambda run, kind, at, query: run.session(
        kind, *at.values()
    ),
    "/tokens/{step:int}/{prompt:int}/{session:int}/{trajectory:int}": lambda run, kind, at, query: run.tokens(
        *at.values()
    ),
    "/step/{step:int}": lambda run, kind, at, query: run.step(at["step"]),
    "/teachers": lambda run, kind, at, query: run.teachers(),
    "/recipe": lambda run, kind, at, query: run.recipe_page(),
    "/log": lambda run, kind, at, query: run.log(),
}
"""The questions about a run: the path below it, and the answer. `kind` is samples or eval, `at` the path's
numbers in order."""


async def news(runs: Sequence[RunView], is_ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield server-sent events: the ids of runs whose files have changed; else a comment now and then. All
    are named at first: they may have changed since the page asked for them."""
    stamps: dict[str, Any] = {}
    yield "retry: 1000\n\n"
    quiet = 0.0
    while True:
        for run in runs:
            stamp = await run_in_threadpool(run.stamp)
            if stamp != stamps.get(run.id):
                stamps[run.id], quiet = stamp, 0.0
                yield f"data: {json.dumps({'run': run.id})}\n\n"
        if quiet >= BEAT_EVERY_S:
            quiet = 0.0
            yield ": still here\n\n"
        if is_ending():
            break
        await asyncio.sleep(LOOK_EVERY_S)
        quiet += LOOK_EVERY_S
    yield "event: end\ndata: {}\n\n"


def static(name: str) -> Response:
    """Return a file of the page, and nothing outside of its folder."""
    parts = name.split("/")
    path = STATIC.joinpath(*parts)
    if any(part in ("", ".", "..") for part in parts) or not name.endswith(SUFFIXES) or not path.is_file():
        return _sentence(404, f"practicum view has no file {name!r}.")
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    return Response(path.read_bytes(), media_type=kind, headers=HEADERS)


def _answered(ask: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:

    async def endpoint(request: Request) -> Response:
        try:
            text = await run_in_threadpool(lambda: to_json(ask(request)))
        except PracticumError as error:
            return _sentence(409, str(error))
        except asyncio.CancelledError:  # by a server that ends: nobody waits for the answer
            return _sentence(503, "practicum view is ending.")
        except (KeyError, ValueError) as error:
            return _sentence(400, f"This can't be answered: {error}")
        return Response(text, media_type="application/json", headers=HEADERS)

    return endpoint


def to_json(data: Any) -> str:
    """Return JSON as browsers read it: what is no finite number is null."""
    if isinstance(data, float):
        return repr(data) if math.isfinite(data) else "null"
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:  # some number inside is not finite
        if isinstance(data, Mapping):
            return f"{{{','.join(f'{json.dumps(str(key))}:{to_json(x)}' for key, x in data.items())}}}"
        return f"[{','.join(map(to_json, data))}]"


def _sentence(status: int, text: str) -> Response:
    return Response(json.dumps({"error": text}), status, media_type="application/json", headers=HEADERS)
