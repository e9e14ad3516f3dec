"""A teacher behind a URL: an OpenAI-compatible completions server that returns prompt logprobs.

`probe` of `teachers.probe` finds out before the first step whether a server can do that.
"""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from typing import Any

import httpx2

from practicum.errors import RecipeError, TeacherError
from practicum.recipe.teaching import Teacher
from practicum.rollout.protocol import Scores
from practicum.teachers.place import OpenTime, Row, Wanted, no_scores
from practicum.teachers.prompt_logprobs import Unusable, message_of, read_scores, request_body

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_CLOSE_S = 2.0


class Refused(TeacherError):
    """The server said no, with a status that another try does not change."""

    def __init__(self, what: str, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(what)


class Unreachable(TeacherError):
    """No answer: no connection, a broken one, or a server that is down or overloaded."""


class RemoteTeacher:
    """A place behind a URL; at most `teacher.concurrency` requests are open at once.

    A row's deadline begins when its request gets its turn and covers all tries. The connections belong to
    the event loop of the first request.
    """

    def __init__(self, name: str, teacher: Teacher) -> None:
        assert teacher.url is not None
        assert teacher.model is not None
        self.name, self.model = name, teacher.model
        self.url = teacher.url.rstrip("/")
        self.deadline_s = teacher.deadline_s
        self._retries, self._concurrency = teacher.retries, teacher.concurrency
        self._headers = _headers(name, teacher.api_key_env)
        self._busy = OpenTime()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx2.AsyncClient | None = None
        self._turns: asyncio.Semaphore | None = None
        self._closed = False

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request open."""
        return self._busy.seconds

    async def score(self, row: Row, wanted: Wanted) -> Scores:
        """Scores of one row, at temperature 1; all that servers give."""
        if wanted.hidden or wanted.temperature != 1:
            what = "hidden states" if wanted.hidden else f"logprobs at temperature {wanted.temperature:g}"
            raise TeacherError(
                f"teacher {self.name} can't give {what} of {row.name}: "
                "a server gives logprobs at temperature 1"
            )
        if row.start == len(row.ids):
            return no_scores(wanted, 0)
        answer = await self.ask_scores(row, max(1, wanted.top_k))
        try:
            return read_scores(answer, row.ids, row.start, wanted.top_k)
        except Unusable as error:
            raise TeacherError(self._problem(row.name, str(error))) from error

    async def ask_scores(self, row: Row, k: int) -> Any:
        """The server's answer about a whole row, as it came."""
        return await self.ask("POST", "/completions", request_body(self.model, row.ids, k), row.name)

    async def ask(self, method: str, path: str, body: Any, about: str) -> Any:
        """The JSON that the server answers, tried again where that may help; else Refused or Unreachable."""
        client, turns = self._open()
        async with turns:
            with self._busy.work():
                try:
                    async with asyncio.timeout(self.deadline_s):
                        return await self._tries(client, method, path, body, about)
                except TimeoutError:
                    why = (
                        f"no answer within {self.deadline_s:g} s; if the server is only slow, raise "
                        f"teachers.{self.name}.deadline_s or lower teachers.{self.name}.concurrency"
                    )
                    raise Unreachable(self._problem(about, why)) from None

    async def aclose(self) -> None:
        """Close the connections; from a coroutine of their event loop."""
        self._closed = True
        if self._client is not None:
            await self._client.aclose()

    def close(self) -> None:
        """Close the connections; from a thread that does not run their event loop."""
        self._closed = True
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result(_CLOSE_S)

    def _open(self) -> tuple[httpx2.AsyncClient, asyncio.Semaphore]:
        if self._closed:
            raise TeacherError(f"teacher {self.name} was closed")
        if self._client is None or self._turns is None:
            self._loop = asyncio.get_running_loop()
            # `_turns` bounds the connections too; each is kept for the next request.
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._concurrency)
            # No timeout of its own: the deadline of `ask` covers connecting, waiting and reading.
            self._client = httpx2.AsyncClient(headers=self._headers, limits=limits, timeout=None)
            self._turns = asyncio.Semaphore(self._concurrency)
        assert self._loop is asyncio.get_running_loop(), "a remote teacher belongs to one event loop"
        return self._client, self._turns

    async def _tries(self, client: httpx2.AsyncClient, method: str, path: str, body: Any, about: str) -> Any:
        until = asyncio.get_running_loop().time() + self.deadline_s
        for attempt in range(self._retries + 1):
            asked_pause = None
            try:
                response = await client.request(method, self.url + path, json=body)
            except httpx2.TransportError as error:
                why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            else:
                if response.is_success:
                    return self._json(response, about)
                message = message_of(response.text)
                why = f"status {response.status_code}: {message}"
                if response.status_code != 429 and response.status_code < 500:
                    raise Refused(self._problem(about, why), response.status_code, message)
                asked_pause = _retry_after(response)
            pause = asked_pause if asked_pause is not None else _pause(self.name, about, attempt)
            if attempt == self._retries or asyncio.get_running_loop().time() + pause >= until:
                tries = "1 try" if attempt == 0 else f"{attempt + 1} tries"
                raise Unreachable(self._problem(about, f"no answer after {tries}: {why}"))
            await asyncio.sleep(pause)
        raise AssertionError("the last try raises or returns")

    def _json(self, response: httpx2.Response, about: str) -> Any:
        try:
            return json.loads(response.content)
        except ValueError as error:
            why = "the answer is no JSON"
            raise Refused(self._problem(about, why), response.status_code, why) from error

    def _problem(self, about: str, why: str) -> str:
        return f"teacher {self.name} at {self.url}, {about}: {why}"


def _headers(name: str, variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not (key := os.environ.get(variable)):
        raise RecipeError(
            f"teachers.{name}.api_key_env",
            f"{variable}, which is not set",
            "an environment variable with the server's key",
            f"export {variable}=… before the run, or leave the option out if the server needs no key",
        )
    return {"Authorization": f"Bearer {key}"}


def _pause(name: str, about: str, attempt: int) -> float:
    """Seconds until the next try: doubling, and spread by a hash so that rows do not come back at once."""
    spread = zlib.crc32(f"{name}/{about}/{attempt}".encode()) / 2**32
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * (0.5 + spread)


def _retry_after(response: httpx2.Response) -> float | None:
    """Seconds that the server asks to wait; a date is left to our own pause."""
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None
