"""What becomes of a session whose loop does something wrong."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from practicum.concurrency.event_loop import run_async
from practicum.errors import EngineError
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.rollout_sections import Agent, ToolSection
from practicum.sessions.attempts import AttemptResult, Loop, run_attempt
from practicum.sessions.session import Session
from practicum.sessions.tools.tool import ToolError
from practicum.sessions.tools.toolbox import Toolbox
from tests.sessions.sessions import Scripted, session_of

TOKENIZER = make_tokenizer()


def attempt(loop: Loop, deadline_s: float = 30.0, **agent: Any) -> AttemptResult:
    """How an attempt by the loop ends, on the event loop of runs."""

    def make(number: int) -> Session:
        policy = Scripted([TOKENIZER.encode("12", add_special_tokens=False)] * 4)
        toolbox = Toolbox([ToolSection(use="calculator")])
        return session_of("sort:21=", policy, context=16, toolbox=toolbox, attempt=number)

    work = run_attempt(loop, Agent.model_validate({"loop": "mine:loop", **agent}), make, deadline_s)
    return run_async(work, timeout=60, owner="test")


async def _all_at_once(*works: Any) -> None:
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)


async def _raise(error: BaseException) -> None:
    raise error


async def cancels_itself(session: Session) -> None:
    raise asyncio.CancelledError


async def awaits_what_was_cancelled(session: Session) -> None:
    other = asyncio.ensure_future(asyncio.sleep(10))
    other.cancel()
    await other


async def interrupts(session: Session) -> None:
    raise KeyboardInterrupt


async def exits_in_a_task(session: Session) -> None:
    await _all_at_once(_raise(SystemExit(3)))


async def exits(session: Session) -> None:
    sys.exit("enough")


async def fails_in_nested_tasks(session: Session) -> None:
    await _all_at_once(_all_at_once(_raise(ValueError("inner"))))


async def asks_for_no_tokens_in_a_task(session: Session) -> None:
    await _all_at_once(session.generate(max_new_tokens=0))


async def asks_for_no_tokens(session: Session) -> None:
    await session.generate(max_new_tokens=0)


async def lets_a_tools_error_out(session: Session) -> None:
    raise ToolError("no such city")


async def has_its_own_timeout(session: Session) -> None:
    raise TimeoutError("mine")


async def returns_text(session: Session) -> str:
    return (await session.generate()).text


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (cancels_itself, "cancelled itself"),
        (awaits_what_was_cancelled, "cancelled itself"),
        (interrupts, "raised KeyboardInterrupt"),
        (exits, "raised SystemExit: enough"),
        (exits_in_a_task, "raised SystemExit: 3"),
        (fails_in_nested_tasks, "raised ValueError: inner"),
        (asks_for_no_tokens_in_a_task, "raised SessionError: max_new_tokens is 0"),
        (asks_for_no_tokens, "raised SessionError: max_new_tokens is 0"),
        (lets_a_tools_error_out, "raised ToolError: no such city"),
        (has_its_own_timeout, "raised TimeoutError: mine"),
        (returns_text, "returned a str; expected"),
    ],
)
def test_what_a_loop_does_wrong_fails_its_session_alone(loop: Loop, reason: str):
    ended = attempt(loop)
    assert ended.result is None
    assert (ended.failure or "").startswith(f"agent loop mine:loop {reason}")


async def goes_on_in_a_full_context(session: Session) -> None:
    while True:
        await session.generate("1")


async def calls_a_tool_for_ever(session: Session) -> None:
    while True:
        await session.tool("calculator", {"expression": "1+1"})


async def awaits_for_ever(session: Session) -> None:
    await session.generate()
    await asyncio.Event().wait()


@pytest.mark.parametrize("loop", [goes_on_in_a_full_context, calls_a_tool_for_ever, awaits_for_ever])
def test_a_loop_that_never_ends_fails_at_its_deadline(loop: Loop):
    assert attempt(loop, 0.2).failure == "agent loop mine:loop was not done after agent.deadline_s = 0.2 s"


def test_a_loop_that_does_not_listen_is_left_behind():
    over = asyncio.Event()

    async def stubborn(session: Session) -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    failure = attempt(stubborn, 0.1).failure
    assert failure is not None
    assert failure.endswith("after agent.deadline_s = 0.1 s, and did not end when it was cancelled")

    async def release() -> None:
        over.set()

    run_async(release(), timeout=5, owner="test")


@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "in a task group"])
def test_trouble_of_the_engine_is_not_the_loops(grouped: bool):
    async def loop(session: Session) -> None:
        trouble = _raise(EngineError("out of memory"))
        await (_all_at_once(trouble) if grouped else trouble)

    with pytest.raises(EngineError, match="out of memory"):
        attempt(loop)


def test_a_failed_session_is_tried_again():
    tries = []

    async def third_time(session: Session) -> None:
        tries.append(session)
        await session.generate()
        if len(tries) < 3:
            raise ValueError("not yet")

    ended = attempt(third_time, on_failure="retry")
    assert ended.result is not None
    assert ended.result.trajectories == [tries[2].trajectory]
    assert (ended.failure, ended.retries) == (None, 2)
