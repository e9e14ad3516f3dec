"""An HTTP server on the loopback interface for the sessions of this process."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from practicum.processes.http_server import (
    Refusal,
    has_left,
    json_response,
    make_app,
    make_server,
    read_body,
    sent_key,
)
from practicum.sessions.endpoint.agent_session import AgentSession, Exchange, RequestMarks
from practicum.sessions.endpoint.dialects import DIALECTS, Dialect, Messages
from practicum.sessions.endpoint.turn_request import TurnRequest
from practicum.sessions.session import Session
from practicum.user_code import finite_number, short_repr

MODEL = "student"
"""Name of the model. Requests may use any name."""
MAX_BODY = 64 << 20
PING_S = 3.0
"""Seconds between keep-alives of a stream while its turn is sampled."""
_ENDED = 4096
"""Number of keys of ended sessions that are remembered."""
_LARGE_BODY = 1 << 18


class AgentEndpoint:
    """Serves the sessions of an event loop. Each session has a random key until it ends."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self._sessions: dict[str, AgentSession] = {}
        self._ended: deque[str] = deque(maxlen=_ENDED)
        self.strays = 0
        """Number of rejected requests that belong to no running session."""
        routes: list[Route] = []
        for prefix in ("", "/sessions/{session}"):
            for path in DIALECTS:
                routes.append(Route(f"{prefix}/v1/{path}", self._turn, methods=["POST"]))
            routes.append(Route(f"{prefix}/v1/messages/count_tokens", self._count_tokens, methods=["POST"]))
            routes.append(Route(f"{prefix}/v1/reward", self._reward, methods=["POST"]))
            routes.append(Route(f"{prefix}/v1/models", self._models))
        self._server = make_server(make_app(routes, self._error), None, lifespan="off")
        self.serving = asyncio.create_task(self._server.serve([self.socket]), name="agents' endpoint")

    @asynccontextmanager
    async def open(self, session: Session) -> AsyncIterator[tuple[str, AgentSession]]:
        """Serve a session inside the context, and yield its key."""
        key, agent = f"sk-{secrets.token_urlsafe(24)}", AgentSession(session)
        self._sessions[key] = agent
        try:
            yield key, agent
        finally:
            del self._sessions[key]
            self._ended.append(key)
            if not agent.is_over:
                await agent.end()

    def _find(self, request: Request) -> AgentSession:
        """Return the session that a request names by URL, header or key."""
        key, header = sent_key(request), request.headers.get("x-session-id", "")
        # Some clients send their own ids in the header.
        name = request.path_params.get("session") or (header if header in self._sessions else key)
        agent = self._sessions.get(name)
        if agent is None:
            if name in self._ended or header in self._ended:
                raise Refusal(409, "the session has ended", "session_ended")
            raise Refusal(
                401, "no session has this key: send it as `Authorization: Bearer KEY`", "invalid_key"
            )
        request.state.agent = agent
        if key != name and key in self._sessions:
            raise Refusal(403, "the key is another session's", "other_session")
        return agent

    async def _turn(self, request: Request) -> Response:
        agent, dialect = self._find(request), _dialect(request)
        try:
            body = await read_body(request, MAX_BODY)
            asked = await _read(dialect, body, agent)
            exchange = self._ask(agent, asked, request, body)
            if asked.stream:
                # A turn that fails early returns an error status instead of a stream.
                await asyncio.wait({exchange.task}, timeout=PING_S)
                if not exchange.task.done() or exchange.task.exception() is None:
                    events = _stream(dialect, asked, exchange)
                    return StreamingResponse(events, media_type="text/event-stream")
            replies = await asyncio.shield(exchange.task)
        except asyncio.CancelledError:
            if agent.is_over:
                raise Refusal(409, "the session has ended", "session_ended") from None
            raise
        exchange.is_left = has_left(request) and not exchange.is_delivered
        exchange.is_delivered |= not exchange.is_left
        return json_response(dialect.write(asked, replies))

    def _ask(self, agent: AgentSession, asked: TurnRequest, request: Request, body: bytes) -> Exchange:
        if agent.is_over:
            raise Refusal(409, "the session has ended", "session_ended")
        retry = request.headers.get("x-stainless-retry-count", "")
        path = request.url.path.partition("/v1/")[2]
        marks = RequestMarks(
            blake2b(path.encode() + b"\0" + body, digest_size=16).digest(),
            request.headers.get("idempotency-key"),
            int(retry) if retry.isdecimal() else None,
            path,
            request.headers.get("user-agent", "")[:80],
        )
        return agent.ask(asked, marks)

    async def _count_tokens(self, request: Request) -> Response:
        agent = self._find(request)
        asked = await _read(_dialect(request), await read_body(request, MAX_BODY), agent)
        return json_response({"input_tokens": agent.count_tokens(asked)})

    async def _reward(self, request: Request) -> Response:
        agent = self._find(request)
        data = await _json(await read_body(request, MAX_BODY))
        if finite_number(reward := data.get("reward")) is None:
            raise Refusal(400, f"reward is {short_repr(reward, 60)}, expected a finite number")
        agent.reward = reward
        return json_response({"reward": reward})

    async def _models(self, request: Request) -> Response:
        self._find(request)
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "practicum", "type": "model"}
        return json_response({"object": "list", "data": [entry], "has_more": False})

    def _error(self, request: Request, status: int, message: str, code: str | None) -> dict[str, Any]:
        """Count a rejected request, and return the error in its dialect."""
        agent: AgentSession | None = getattr(request.state, "agent", None)
        if agent is None or agent.is_over:
            self.strays += status < 500
        else:
            agent.counts["refused"] += status < 500
        return _dialect(request).error(status, message, code)


_ENDPOINTS: dict[asyncio.AbstractEventLoop, AgentEndpoint] = {}


def running_endpoint() -> AgentEndpoint:
    """Return the endpoint of the running event loop, which starts at the first call and ends with the
    loop."""
    loop = asyncio.get_running_loop()
    if loop not in _ENDPOINTS:
        _ENDPOINTS[loop] = endpoint = AgentEndpoint()
        endpoint.serving.add_done_callback(lambda _: _ENDPOINTS.pop(loop).socket.close())
    return _ENDPOINTS[loop]


def _dialect(request: Request) -> Dialect:
    path = request.url.path.partition("/v1/")[2]
    if path.startswith("messages") or "anthropic-version" in request.headers:
        return DIALECTS["messages"]
    return DIALECTS.get(path, DIALECTS["chat/completions"])


async def _json(body: bytes) -> dict[str, Any]:
    try:
        data = await asyncio.to_thread(json.loads, body) if len(body) > _LARGE_BODY else json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise Refusal(400, "the body must be a JSON object")
    return data


async def _read(dialect: Dialect, body: bytes, agent: AgentSession) -> TurnRequest:
    data = await _json(body)
    try:
        return dialect.read(data, agent.replies)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise Refusal(400, f"the request can't be read: {short_repr(error)}") from None


async def _stream(dialect: Dialect, asked: TurnRequest, exchange: Exchange) -> AsyncIterator[bytes]:
    """Yield keep-alives, then the finished turn as events. Record a client that disconnects."""
    try:
        while not exchange.task.done():
            yield dialect.ping
            await asyncio.wait({exchange.task}, timeout=PING_S)
        if exchange.task.cancelled() or exchange.task.exception() is not None:
            message = "the session has ended" if exchange.task.cancelled() else str(exchange.task.exception())
            named = isinstance(dialect, Messages)
            yield _event("error" if named else None, dialect.error(500, message, None))
            return
        for name, data in dialect.events(asked, exchange.task.result()):
            yield _event(name, data)
        exchange.is_delivered = True
    finally:
        exchange.is_left = not exchange.is_delivered


def _event(name: str | None, data: dict[str, Any] | str) -> bytes:
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
