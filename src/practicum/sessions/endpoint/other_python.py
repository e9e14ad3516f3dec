"""Functions that run in another Python environment: one process for all sessions of an event loop.

Their frameworks may need versions that practicum's environment can't have. The process runs
`agent_worker.py`, which needs the standard library alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from practicum.concurrency.user_calls import CallResult
from practicum.errors import RecipeError
from practicum.recipe.schema.rollout_sections import FunctionLoop
from practicum.user_code import shorten

WORKER = Path(__file__).with_name("agent_worker.py")
IDLE_S = 600.0
"""Seconds without a session after which a process ends."""
_START_S = 120.0
_running: dict[tuple[asyncio.AbstractEventLoop, str, str], OtherPython] = {}


def running_process(spec: FunctionLoop) -> OtherPython:
    """Return the process of a function for the running event loop, started if none runs."""
    place = asyncio.get_running_loop(), spec.function, spec.python or ""
    process = _running.get(place)
    if process is None or process.has_ended:
        process = _running[place] = OtherPython(spec)
    return process


def close_processes() -> None:
    """End the processes of all functions."""
    while _running:
        _running.popitem()[1].close()


class OtherPython:
    """A process that runs a function. It ends when its input is closed, and therefore with this process."""

    def __init__(self, spec: FunctionLoop) -> None:
        self._loop, self._numbers = asyncio.get_running_loop(), count()
        self._log = TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._calls: dict[int, asyncio.Future[CallResult]] = {}
        self._process = subprocess.Popen(
            [spec.python or "", str(WORKER), spec.function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(),
        )
        self._idle: asyncio.TimerHandle | None = None
        self.has_ended = False
        threading.Thread(target=self._read, name="agent's process", daemon=True).start()

    async def call(self, task: Mapping[str, Any]) -> CallResult:
        """Return the function's outcome for a task. Cancelling this cancels an async function."""
        number, arrival = next(self._numbers), self._loop.create_future()
        self._calls[number] = arrival
        if self._idle is not None:
            self._idle.cancel()
        try:
            self._send({"id": number, "task": dict(task)})
            return await arrival
        finally:
            del self._calls[number]
            if arrival.cancelled():
                self._send({"cancel": number})
            if not self._calls:
                self._idle = self._loop.call_later(IDLE_S, self.close)

    def close(self) -> None:
        """End the process. Sessions that still run fail."""
        self.has_ended = True
        self._process.kill()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the process has ended: the reader reports it to all calls
            self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        """Pass outcomes on to their calls, until the process ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process.stdout as replies:
            for line in replies:
                self._loop.call_soon_threadsafe(self._arrive, json.loads(line))
        code = self._process.wait()
        with suppress(OSError):  # what the process has not read
            self._process.stdin.close()
        with self._log as log:
            log.seek(0)
            text = log.read().decode("utf-8", "replace").strip()
        last = shorten(" ".join(text.split("\n")[-3:]), 300)
        self._loop.call_soon_threadsafe(self._end, f"ended with its process (exit code {code}): {last}")

    def _arrive(self, message: dict[str, Any]) -> None:
        arrival = self._calls.get(message["id"])
        if arrival is not None and not arrival.done():
            arrival.set_result(CallResult(message.get("value"), message.get("failure")))

    def _end(self, failure: str) -> None:
        self.has_ended = True
        if self._idle is not None:
            self._idle.cancel()
        for arrival in self._calls.values():
            if not arrival.done():
                arrival.set_result(CallResult(failure=failure))


@cache
def check_other_python(python: str, function: str) -> None:
    """Raise a RecipeError if the other Python does not start or can't import the function."""
    if shutil.which(python) is None:
        raise RecipeError("agent.loop.python", repr(python), "a Python interpreter")
    command = [python, str(WORKER), function, "--check"]
    try:
        done = subprocess.run(command, capture_output=True, env=_environment(), timeout=_START_S, text=True)
    except subprocess.TimeoutExpired:
        raise RecipeError(
            "agent.loop.function", f"{function}: not imported in {_START_S:g} s", "a function"
        ) from None
    if done.returncode:
        last = shorten((done.stderr.strip().splitlines() or [""])[-1], 300)
        raise RecipeError(
            "agent.loop.function", f"{function} in {python}: {last}", "a function of one AgentTask"
        )


def _environment() -> dict[str, str]:
    return {**os.environ, "OPENAI_AGENTS_DISABLE_TRACING": "1"}
