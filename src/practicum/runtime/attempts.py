"""Running sessions: one attempt at a prompt, its deadline, its failures and its further tries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from practicum.errors import EngineError, PracticumError
from practicum.recipe.agent import Agent, Retry
from practicum.rollout.protocol import Sampling
from practicum.rollout.results import Loop, Result, read_result
from practicum.rollout.session import Session
from practicum.tasks.calls import shorten
from practicum.tasks.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Attempt:
    """One session to run: which prompt, which of its sessions, drawn how."""

    prompt: Prompt
    session: int
    sampling: Sampling
    is_baseline: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """How an attempt ended: with a result, or with the reason why not; and its further tries."""

    result: Result | None
    failure: str | None
    retries: int


async def run_attempt(loop: Loop, agent: Agent, make: Callable[[int], Session]) -> Ended:
    """Run a session by the loop, again if it fails and the recipe says so; `make` opens try number n.

    What the loop does wrong is its failure. Trouble of the engine is not the loop's and is raised.
    """
    tries = 1 + (agent.on_failure.retry if isinstance(agent.on_failure, Retry) else 0)
    failure = None
    for number in range(tries):
        outcome = await _run_once(loop, agent, make(number))
        if isinstance(outcome, Result):
            return Ended(outcome, None, number)
        failure = f"agent loop {agent.loop} {outcome}"
    return Ended(None, failure, tries - 1)


async def _run_once(loop: Loop, agent: Agent, session: Session) -> Result | str:
    clock = asyncio.timeout(agent.deadline_s)
    try:
        async with clock:
            returned = await loop(session)
    except PracticumError:
        raise
    except (Exception, SystemExit) as error:
        if clock.expired():
            return f"was not done after agent.deadline_s = {agent.deadline_s:g} s"
        return f"raised {type(error).__name__}: {shorten(str(error))}"
    try:
        return read_result(returned, session, agent.loop)
    except EngineError as error:
        return str(error)
