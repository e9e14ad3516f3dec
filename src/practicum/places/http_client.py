"""Requests to an OpenAI-compatible server: bounded in number and time, tried again where that may help."""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from dataclasses import dataclass
from typing import Any

import httpx2

from practicum.concurrency.open_time import OpenTime
from practicum.errors import RecipeError, TeacherError
from practicum.places.prompt_logprobs import message_of

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_CLOSE_S = 2.0


class Refused(TeacherError):
    """The server said no, with a status that another try does not change."""

    def __init__(self, what: str, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(what)


class Unreachable(TeacherError):
    """No answer: no connection, a broken one, or a server that is down or overloaded."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a server is asked. `path` is the recipe's key of who lives there, for errors."""

    path: str
    url: str
    model: str
    deadline_s: float
    concurrency: int
    retries: int
    api_key_env: str | None


class Client:
    """A model behind a URL; at most `concurrency` requests are open at once.

    A request's deadline begins when it gets its turn and covers all tries. The connections belong to the
    event loop of the first request. `who` begins the error messages.
    """

    def __init__(self, who: str, access: Access) -> None:
        self.who, self.path, self.model = who, access.path, access.model
        self.url = access.url.rstrip("/")
        self.deadline_s = access.deadline_s
        self._retries, self._concurrency = access.retries, access.concurrency
        self._headers = _headers(access)
        self._busy = OpenTime()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx2.AsyncClient | None = None
        self._turns: asyncio.Semaphore | None = None
        self._closed = False

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request open."""
        return self._busy.seconds

    async def ask(self, method: str, path: str, body: Any, about: str, *, base: str | None = None) -> Any:
        """The JSON that the server answers, tried again where that may help; else Refused or Unreachable.

        `path` is below the URL, or below `base`. A body that is a function is made when its turn comes.
        """
        client, turns = self._open()
        url = (self.url if base is None else base) + path
        async with turns:
            with self._busy.work():
                try:
                    async with asyncio.timeout(self.deadline_s):
                        made = body() if callable(body) else body
                        return await self._tries(client, method, url, made, about)
                except TimeoutError:
                    why = (
                        f"no answer within {self.deadline_s:g} s; if the server is only slow, raise "
                        f"{self.path}.deadline_s or lower {self.path}.concurrency"
                    )
                    raise Unreachable(self.problem(about, why)) from None

    def problem(self, about: str, why: str) -> str:
        """A sentence for an error that names the model, its server and what was asked."""
        return f"{self.who} at {self.url}, {about}: {why}"

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
            raise TeacherError(f"{self.who} was closed")
        if self._client is None or self._turns is None:
            self._loop = asyncio.get_running_loop()
            # `_turns` bounds the connections too; each is kept for the next request.
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._concurrency)
            # No timeout of its own: the deadline of `ask` covers connecting, waiting and reading.
            self._client = httpx2.AsyncClient(headers=self._headers, limits=limits, timeout=None)
            self._turns = asyncio.Semaphore(self._concurrency)
        assert self._loop is asyncio.get_running_loop(), "a client belongs to one event loop"
        return self._client, self._turns

    async def _tries(self, client: httpx2.AsyncClient, method: str, url: str, body: Any, about: str) -> Any:
        until = asyncio.get_running_loop().time() + self.deadline_s
        for attempt in range(self._retries + 1):
            asked_pause = None
            try:
                response = await client.request(method, url, json=body)
            except httpx2.TransportError as error:
                why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            else:
                if response.is_success:
                    return self._json(response, about)
                message = message_of(response.text)
                why = f"status {response.status_code}: {message}"
                if response.status_code != 429 and response.status_code < 500:
                    raise Refused(self.problem(about, why), response.status_code, message)
                asked_pause = _retry_after(response)
            pause = asked_pause if asked_pause is not None else _pause(self.who, about, attempt)
            if attempt == self._retries or asyncio.get_running_loop().time() + pause >= until:
                tries = "1 try" if attempt == 0 else f"{attempt + 1} tries"
                raise Unreachable(self.problem(about, f"no answer after {tries}: {why}"))
            await asyncio.sleep(pause)
        raise AssertionError("the last try raises or returns")

    def _json(self, response: httpx2.Response, about: str) -> Any:
        try:
            return json.loads(response.content)
        except ValueError as error:
            why = "the answer is no JSON"
            raise Refused(self.problem(about, why), response.status_code, why) from error


def _headers(access: Access) -> dict[str, str]:
    variable = access.api_key_env
    if variable is None:
        return {}
    if not (key := os.environ.get(variable)):
        raise RecipeError(
            f"{access.path}.api_key_env",
            f"{variable}, which is not set",
            "an environment variable with the server's key",
            f"export {variable}=… before the run, or leave the option out if the server needs no key",
        )
    return {"Authorization": f"Bearer {key}"}


def _pause(who: str, about: str, attempt: int) -> float:
    """Seconds until the next try: doubling, and spread by a hash so that rows do not come back at once."""
    spread = zlib.crc32(f"{who}/{about}/{attempt}".encode()) / 2**32
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * (0.5 + spread)


def _retry_after(response: httpx2.Response) -> float | None:
    """Seconds that the server asks to wait; a date is left to our own pause."""
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None
