"""A model behind a URL: limits on concurrent requests and time, and checks before the first step."""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx2

from practicum.concurrency.busy_time import BusyTime
from practicum.errors import RecipeError, TeacherError
from practicum.recipe.schema.teacher_sections import RewardModel, Teacher

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
RETRIES = 3
"""Maximum retries of a failed request."""
_CLOSE_S = 2.0


class Refused(TeacherError):
    """The server rejected a request with a status that a retry does not change."""

    def __init__(self, what: str, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(what)


class Unreachable(TeacherError):
    """No response: connection failed or broke, or the server is down or overloaded."""


class Unusable(ValueError):
    """A response that lacks requested data. The message names it."""


class Client:
    """A model behind a URL, with at most `concurrency` concurrent requests.

    A request's deadline starts when it is sent and covers all retries. The connections belong to the event
    loop of the first request. `who` begins the error messages, and `path` is the model's recipe key.
    """

    serve_commands = "vllm serve"
    name_options = "vllm serve … --served-model-name"
    """Command that starts such a server, and its option for the model's name, for advice."""
    expected = "an OpenAI-compatible server with /models and /completions below this URL"
    advice = ""
    """Expected server and advice, for errors."""

    def __init__(self, who: str, path: str, spec: Teacher | RewardModel) -> None:
        assert spec.url is not None
        assert spec.model is not None
        self.who, self.path, self.model = who, path, spec.model
        self.url = spec.url.rstrip("/")
        self.deadline_s = spec.deadline_s
        self._concurrency = spec.concurrency
        self._key_variable, self._headers = spec.api_key_env, _headers(path, spec.api_key_env)
        self._busy = BusyTime()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx2.AsyncClient | None = None
        self._slots: asyncio.Semaphore | None = None
        self._closed = False

    @property
    def busy_s(self) -> float:
        """Seconds with at least one request open."""
        return self._busy.seconds

    async def ask(self, method: str, path: str, body: Any, about: str, *, base: str | None = None) -> Any:
        """Return the server's JSON, with retries for temporary failures. Raise Refused or Unreachable. `path`
        is relative to the URL, or to `base`. A callable body is called when a slot is free."""
        client, slots = self._open()
        url = (self.url if base is None else base) + path
        async with slots:
            with self._busy.work():
                try:
                    async with asyncio.timeout(self.deadline_s):
                        sent = body() if callable(body) else body
                        return await self._tries(client, method, url, sent, about)
                except TimeoutError:
                    why = (
                        f"no response within {self.deadline_s:g} s; if the server is only slow, raise "
                        f"{self.path}.deadline_s or lower {self.path}.concurrency"
                    )
                    raise Unreachable(self.problem(about, why)) from None

    async def check_model(self) -> dict[str, Any]:
        """Return the server's description of the model. Raise RecipeError if it does not have the model."""
        with self.recipe_errors("its list of models"):
            answer = await self.ask("GET", "/models", None, "its models")
        try:
            models = {str(entry["id"]): entry for entry in answer["data"]}
        except (KeyError, TypeError) as error:
            found = f"{self.url}/models without a list of models"
            raise RecipeError(f"{self.path}.url", found, self.expected) from error
        if self.model not in models:
            raise RecipeError(
                f"{self.path}.model",
                self.model,
                f"a model of {self.url}: {', '.join(sorted(models)) or 'it has none'}",
                f"use one of these names, or serve the model under this name ({self.name_options})",
            )
        found = models[self.model]
        # vLLM reports the context of an adapter with its base model.
        base = models.get(str(found.get("parent")), {})
        return {**base, **{key: value for key, value in found.items() if value is not None}}

    @contextmanager
    def recipe_errors(self, what: str) -> Iterator[None]:
        """Turn a rejection of `what`, a missing or an unusable response into a RecipeError."""
        advice = self.advice if self.url.endswith("/v1") else "the URL of such servers ends in /v1"
        try:
            yield
        except Refused as refusal:
            found = f"a server that rejects {what} with status {refusal.status} ({refusal.message})"
            if refusal.status in (401, 403):
                advice = "set it to the environment variable with the server's key"
                if self._key_variable is not None:
                    found = f"the key in {self._key_variable}, and {found}"
                    advice = f"export {self._key_variable}=… with a key of the server"
                key = f"{self.path}.api_key_env"
                raise RecipeError(key, found, "a key that it accepts", advice) from refusal
            raise RecipeError(f"{self.path}.url", found, self.expected, advice) from refusal
        except Unusable as error:
            raise RecipeError(f"{self.path}.url", str(error), self.expected, advice) from error
        except Unreachable as error:
            raise RecipeError(
                f"{self.path}.url",
                f"{self.url}, which can't be reached ({error})",
                "a server that answers",
                f"start it ({self.serve_commands} {self.model} --port …), or correct the URL",
            ) from error

    def problem(self, about: str, why: str) -> str:
        """Return a message that names the model, its server and the request."""
        return f"{self.who} at {self.url}, {about}: {why}"

    async def aclose(self) -> None:
        """Close the connections. Call it from a coroutine of their event loop."""
        self._closed = True
        if self._client is not None:
            await self._client.aclose()

    def close(self) -> None:
        """Close the connections. Call it from a thread that does not run their event loop."""
        self._closed = True
        if self._loop is not None and self._loop.is_running():
            closed = asyncio.run_coroutine_threadsafe(self.aclose(), self._loop)
            with suppress(TimeoutError):  # if the event loop is blocked, connections end with the process
                closed.result(_CLOSE_S)

    def _open(self) -> tuple[httpx2.AsyncClient, asyncio.Semaphore]:
        if self._closed:
            raise TeacherError(f"{self.who} was closed")
        if self._client is None or self._slots is None:
            self._loop = asyncio.get_running_loop()
            # `_slots` bounds the connections too; each is kept for the next request.
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._concurrency)
            # No timeout here: the deadline of `ask` covers connecting, waiting and reading.
            self._client = httpx2.AsyncClient(headers=self._headers, limits=limits, timeout=None)
            self._slots = asyncio.Semaphore(self._concurrency)
        assert self._loop is asyncio.get_running_loop(), "a client belongs to one event loop"
        return self._client, self._slots

    async def _tries(self, client: httpx2.AsyncClient, method: str, url: str, body: Any, about: str) -> Any:
        until = asyncio.get_running_loop().time() + self.deadline_s
        for attempt in range(RETRIES + 1):
            retry_after = None
            try:
                response = await client.request(method, url, json=body)
            except httpx2.TransportError as error:
                why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            else:
                if response.is_success:
                    try:
                        return json.loads(response.content)
                    except (ValueError, RecursionError) as error:
                        why = "the response is not JSON"
                        raise Refused(self.problem(about, why), response.status_code, why) from error
                message = message_of(response.text)
                why = f"status {response.status_code}: {message}"
                if response.status_code in (401, 403) and self._key_variable is not None:
                    why += f" (the key is in {self._key_variable})"
                if response.status_code != 429 and response.status_code < 500:
                    raise Refused(self.problem(about, why), response.status_code, message)
                retry_after = _retry_after(response)
            pause = retry_after if retry_after is not None else _pause(self.who, about, attempt)
            if attempt == RETRIES or asyncio.get_running_loop().time() + pause >= until:
                tries = "1 try" if attempt == 0 else f"{attempt + 1} tries"
                raise Unreachable(self.problem(about, f"no response after {tries}: {why}"))
            await asyncio.sleep(pause)
        raise AssertionError("the last try raises or returns")


def message_of(text: str) -> str:
    """Extract the message from the body of a server's error."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = text
    for key in ("error", "message", "detail"):
        if isinstance(content, dict) and key in content:
            content = content[key]
    return " ".join(str(content).split())[:500] or "(no message)"


def _headers(path: str, variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not (key := os.environ.get(variable)):
        raise RecipeError(
            f"{path}.api_key_env",
            f"{variable}, which is not set",
            "an environment variable with the server's key",
            f"export {variable}=… before the run, or remove the option if the server needs no key",
        )
    return {"Authorization": f"Bearer {key}"}


def _pause(who: str, about: str, attempt: int) -> float:
    """Return the seconds until the next try: exponential backoff, with jitter from a hash."""
    spread = zlib.crc32(f"{who}/{about}/{attempt}".encode()) / 2**32
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * (0.5 + spread)


def _retry_after(response: httpx2.Response) -> float | None:
    """Return the seconds in the server's Retry-After. Dates are ignored."""
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None
