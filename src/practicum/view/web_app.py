"""The web application of the viewer: static files, the runs as JSON, and news as server-sent events.

Only this machine may ask, only with the token, and only pages of this server: the name in `Host` is checked
(a foreign name that leads here is refused), so is `Origin`, and the page may load nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from practicum.errors import PracticumError
from practicum.view.diff_pane import compare
from practicum.view.run_view import RunView

LOCAL = ("127.0.0.1", "localhost", "[::1]")
LOOK_EVERY_S = 0.5
"""How often the sizes of the files are looked at while a page is open: another process writes them."""
BEAT_EVERY_S = 10.0
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATIC = files("practicum.view") / "static"
SUFFIXES = (".js", ".css", ".html", ".svg")


class Guard:
    """Refuses requests from other names, other origins and without the token, and sets headers."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._refusal(request)
        if refusal is not None:
            await _sentence(*refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name not in LOCAL:
            return 403, "practicum view answers to 127.0.0.1 and localhost alone."
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "Pages of other origins may not ask practicum view."
        if request.method not in ("GET", "HEAD"):
            return 405, "practicum view only shows: GET alone."
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
    """Cookies are shared by all ports of a machine: each port has its own name."""
    return f"practicum_view_{request.url.port or 80}"


def make_app(runs: Sequence[RunView], token: str, is_ending: Callable[[], bool]) -> Starlette:
    """The application over these runs; nothing else of the file system can be asked for.

    `is_ending` says whether the server waits for open pages to let it go.
    """
    by_id = {run.id: run for run in runs}

    async def page(request: Request) -> Response:
        response = static("index.html")
        name = cookie_name(request)
        response.set_cookie(name, token, httponly=True, samesite="strict", path="/")
        return response

    async def asset(request: Request) -> Response:
        return static(request.path_params["name"])

    async def events(request: Request) -> Response:
        return StreamingResponse(news(runs, is_ending), media_type="text/event-stream", headers=HEADERS)

    def answer(ask: Callable[[RunView, Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            run = by_id.get(request.path_params["run"])
            if run is None:
                return _sentence(404, f"No run {request.path_params['run']!r} was given to practicum view.")
            return await _answered(lambda: ask(run, request))

        return endpoint

    async def first(request: Request) -> Response:
        shown = by_id.get(request.query_params.get("run", ""), runs[0])
        return await _answered(lambda: {"runs": [run.label() for run in runs], "info": shown.info()})

    async def diff(request: Request) -> Response:
        pair = [by_id.get(request.query_params.get(side, "")) for side in ("a", "b")]
        if pair[0] is None or pair[1] is None:
            return _sentence(404, "Both runs of a diff must be given to practicum view.")
        first, second = pair[0], pair[1]
        return await _answered(lambda: compare(first, second))

    asked = [Route(f"/api/run/{{run}}{path}", answer(ask)) for path, ask in ASKED.items()]
    return Starlette(
        routes=[
            Route("/", page),
            Route("/static/{name:path}", asset),
            Route("/api/events", events),
            Route("/api/first", first),
            Route("/api/diff", diff),
            *asked,
        ],
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={404: _not_found},
    )


def _series(run: RunView, request: Request) -> Any:
    query = request.query_params
    first, last = (int(query[side]) if side in query else None for side in ("first", "last"))
    return run.series(query.getlist("name"), first, last)


def _kind(request: Request) -> str:
    return "eval" if request.query_params.get("kind") == "eval" else "samples"


ASKED: Mapping[str, Callable[[RunView, Request], Any]] = {
    "": lambda run, _: run.info(),
    "/series": _series,
    "/rows": lambda run, request: run.rows(_kind(request), int(request.query_params.get("after", 0))),
    "/texts": lambda run, request: run.texts(
        _kind(request), [int(r) for r in request.query_params.getlist("row")]
    ),
    "/search": lambda run, request: run.search(_kind(request), request.query_params["q"]),
    "/newest": lambda run, _: run.newest_group(),
    "/group/{step:int}/{prompt:int}": lambda run, request: run.group(
        _kind(request), request.path_params["step"], request.path_params["prompt"]
    ),
    "/session/{step:int}/{prompt:int}/{session:int}": lambda run, request: run.session(
        _kind(request), *(request.path_params[name] for name in ("step", "prompt", "session"))
    ),
    "/tokens/{step:int}/{prompt:int}/{session:int}/{trajectory:int}": lambda run, request: run.tokens(
        request.path_params["step"],
        tuple(request.path_params[name] for name in ("prompt", "session", "trajectory")),
    ),
    "/step/{step:int}": lambda run, request: run.step(request.path_params["step"]),
    "/forecast": lambda run, _: run.forecast(),
    "/teachers": lambda run, _: run.teachers(),
    "/recipe": lambda run, _: run.recipe_page(),
    "/log": lambda run, _: run.log(),
}
"""What can be asked of a run: path below it, and the answer."""


async def news(runs: Sequence[RunView], is_ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Server-sent events: the ids of runs whose files have changed; else a comment now and then.

    All are named at first: they may have changed since the page asked for them.
    """
    stamps = {run.id: await run_in_threadpool(run.stamp) for run in runs}
    yield "retry: 1000\n\n"
    for run in runs:
        yield _changed(run)
    quiet = 0.0
    while not is_ending():
        await asyncio.sleep(LOOK_EVERY_S)
        quiet += LOOK_EVERY_S
        for run in runs:
            stamp = await run_in_threadpool(run.stamp)
            if stamp != stamps[run.id]:
                stamps[run.id], quiet = stamp, 0.0
                yield _changed(run)
        if quiet >= BEAT_EVERY_S:
            quiet = 0.0
            yield ": still here\n\n"
    yield "event: end\ndata: {}\n\n"


def _changed(run: RunView) -> str:
    return f"data: {json.dumps({'run': run.id})}\n\n"


def static(name: str) -> Response:
    """A file of the page; nothing outside of its folder."""
    parts = name.split("/")
    path = STATIC.joinpath(*parts)
    if any(part in ("", ".", "..") for part in parts) or not name.endswith(SUFFIXES) or not path.is_file():
        return _sentence(404, f"practicum view has no file {name!r}.")
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    return Response(_read(name), media_type=kind, headers=HEADERS)


@lru_cache(64)
def _read(name: str) -> bytes:
    return STATIC.joinpath(*name.split("/")).read_bytes()


async def _answered(ask: Callable[[], Any]) -> Response:
    try:
        found = await run_in_threadpool(ask)
    except PracticumError as error:
        return _sentence(409, str(error))
    except asyncio.CancelledError:  # by a server that ends: nobody waits for the answer
        return _sentence(503, "practicum view is ending.")
    except (KeyError, ValueError) as error:
        return _sentence(400, f"This can't be answered: {error}")
    return Response(to_json(found), media_type="application/json", headers=HEADERS)


def to_json(data: Any) -> str:
    """JSON as browsers read it: what is no finite number is null."""
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_with_nulls(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _with_nulls(data: Any) -> Any:
    if isinstance(data, float):
        return data if data == data and abs(data) != float("inf") else None
    if isinstance(data, Mapping):
        return {key: _with_nulls(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_with_nulls(value) for value in data]
    return data


async def _not_found(request: Request, _: Exception) -> Response:
    return _sentence(404, f"practicum view has nothing at {request.url.path}.")


def _sentence(status: int, text: str) -> Response:
    return Response(json.dumps({"error": text}), status, media_type="application/json", headers=HEADERS)
