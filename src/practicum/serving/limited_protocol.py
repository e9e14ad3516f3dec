"""uvicorn's HTTP protocol with limits: connections at once, seconds for a header and for reading an answer.

uvicorn by itself waits for both as long as a client likes.
"""

from __future__ import annotations

import asyncio
import http
import json
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from practicum.serving.limits import ServerLimits, error_body

_GRACE_S = 0.1
_LEAST_READ = 16_384
"""Bytes of an answer that a client must take in `answer_s`."""


class LimitedProtocol(H11Protocol):
    """One connection. Of too many, the one is closed that has waited longest for a whole request."""

    limits: ClassVar[ServerLimits]
    _timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None
    _since = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether no whole request is here that must be answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        self._await_header()
        others = [c for c in self.connections if isinstance(c, LimitedProtocol) and c is not self]
        others = [c for c in others if not c.transport.is_closing()]
        if len(others) >= self.limits.connections:
            waiting = [c for c in others if c.is_waiting]
            leaves = min(waiting, key=lambda c: c._since) if waiting else self
            leaves.end(503, f"more than {self.limits.connections} connections are open: try again later")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_header()
        else:
            self._timer = _cancelled(self._timer)

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer, self._answer_timer = _cancelled(self._timer), _cancelled(self._answer_timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._answer_timer = _cancelled(self._answer_timer)
        super().resume_writing()

    def end(self, status: int, message: str) -> None:
        """Close the connection, with this answer if a request has begun or is awaited that has none yet."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self._timer is not None:
            self.transport.write(_answer(status, message))
        self.transport.close()

    def _await_header(self) -> None:
        def look_again() -> None:
            # A server that was busy has first to read what has come meanwhile.
            self._timer = self.loop.call_later(_GRACE_S, late)

        def late() -> None:
            self.end(408, f"the header was not there after {self.limits.header_s:g} s")

        if self._timer is None:
            self._timer = self.loop.call_later(self.limits.header_s, look_again)

    def _await_reader(self) -> None:
        """End the connection if little of its answer was read when the time is over; else wait again."""
        unread = self.transport.get_write_buffer_size()

        def look() -> None:
            if unread - self.transport.get_write_buffer_size() < _LEAST_READ:
                self.transport.abort()
            else:
                self._await_reader()

        self._answer_timer = self.loop.call_later(self.limits.answer_s, look)


def limited_protocol(limits: ServerLimits) -> type[LimitedProtocol]:
    """The protocol with these limits."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _answer(status: int, message: str) -> bytes:
    content = json.dumps(error_body(status, message))
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}", "content-type: application/json"]
    lines += [f"content-length: {len(content)}", "connection: close", *(["retry-after: 1"] * (status == 503))]
    return "\r\n".join([*lines, "", content]).encode()
