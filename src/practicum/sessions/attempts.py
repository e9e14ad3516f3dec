"""Running sessions: one attempt at a prompt, its deadline, its failures and its further tries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from practicum.engines.protocol import Sampling
from practicum.errors import PracticumError, SessionError
from practicum.recipe.schema.rollout_sections import Agent, Retry
from practicum.sessions.session import Session
from practicum.sessions.session_result import Loop, SessionResult, read_result
from practicum.sessions.tools.tool import ToolError
from practicum.tasks.prompts import Prompt
from practicum.user_code import error_line, place, trace

_LOOPS_OWN = (SessionError, ToolError)
"""Errors with a sentence that are the loop's fault."""
_CLEANUP_S = 1.0
"""Seconds that a loop has to end after it was cancelled."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One session to run: which prompt, which of its sessions, drawn how."""

    prompt: Prompt
    session: int
    sampling: Sampling
    is_baseline: bool = False


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended: with a result, or with the reason why not; and its further tries."""

    result: SessionResult | None
    failure: str | None
    retries: int
    trace: str | None = None
    """The traceback of a loop that raised."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """What a loop did wrong, and the traceback if it raised."""

    failure: str
    trace: str | None = None


async def run_attempt(
    loop: Loop, agent: Agent, make: Callable[[int], Session], deadline_s: float
) -> AttemptResult:
    """Run a session by the loop, again if it fails and the recipe says so; `make` opens try number n.

    What the loop does wrong is its failure, so is passing the deadline. Trouble of the engine is not the
    loop's and is raised.
    """
    tries = 1 + (agent.on_failure.retry if isinstance(agent.on_failure, Retry) else 0)
    fault = _Fault("had no try")
    for number in range(tries):
        outcome = await _run_once(loop, make(number), deadline_s)
        if isinstance(outcome, SessionResult):
            return AttemptResult(outcome, None, number)
        fault = outcome
    return AttemptResult(None, f"agent loop {agent.loop} {fault.failure}", tries - 1, fault.trace)


async def _run_once(loop: Loop, session: Session, deadline_s: float) -> SessionResult | _Fault:
    """The session's result, or what the loop did wrong."""

    async def body() -> Any:
        return await loop(session)

    task = asyncio.ensure_future(body())
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CLEANUP_S)
    if not done:
        stays = "" if task.done() else ", and did not end when it was cancelled"
        return _Fault(f"was not done after agent.deadline_s = {deadline_s:g} s{stays}")
    if task.cancelled():
        return _Fault("cancelled itself")
    if (error := task.exception()) is not None:
        return _fault(error)
    try:
        return read_result(task.result(), session)
    except SessionError as error:
        return _Fault(str(error))
    except BaseException as error:  # whatever a user's value does when it is read
        return _Fault(f"returned what can't be read: it raised {error_line(error)}", trace(error))


def _fault(error: BaseException) -> _Fault:
    """What the loop raised, in words; the first of a group. Raises it if it is not the loop's fault."""
    causes = list(_causes(error))
    for cause in causes:
        if issubclass(type(cause), PracticumError) and not issubclass(type(cause), _LOOPS_OWN):
            raise cause
    return _Fault(f"raised {error_line(causes[0])}{place(causes[0])}", trace(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group, as task groups raise them, in order; else the error itself."""
    if not issubclass(type(error), BaseExceptionGroup):
        yield error
        return
    assert isinstance(error, BaseExceptionGroup)
    for one in error.exceptions:
        yield from _causes(one)
