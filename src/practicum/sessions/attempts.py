"""Run attempts at a prompt: an agent loop runs a session, its result is read, and failed sessions are
retried.

A loop is `async def loop(session)`. The built-in ones are at the end.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from practicum.concurrency.gather import gather_all
from practicum.engines.protocol import Sampling
from practicum.errors import EngineError, PracticumError, RecipeError, SessionError
from practicum.recipe.own_parts import find_function
from practicum.recipe.schema.rollout_sections import Agent, CommandLoop, FunctionLoop
from practicum.sessions.endpoint.programs import check_function, run_command, run_function
from practicum.sessions.session import Session, Trajectory
from practicum.sessions.tools.tool import ToolError
from practicum.sessions.tools.tool_calls import BadCall, Call, read_calls
from practicum.tasks.messages import Message, tool_result, user
from practicum.tasks.prompts import Prompt
from practicum.user_code import error_line, finite_number, raised_at, short_repr, trace

Loop = Callable[[Session], Awaitable[Any]]
"""Result of a loop: None (all trajectories with sampled tokens), a trajectory, a list of them, or one of
these with a reward, which is a number for the session or a list with one number per trajectory."""

RETRIES = 2
"""Retries of a failed session with agent.on_failure: retry."""
_EXPECTED = "expected None, a Trajectory, a list of them, or (trajectories, reward)"


@dataclass(frozen=True, slots=True)
class SessionResult:
    """A session's trajectories in order, all with sampled tokens, and its reward if the loop returned one."""

    trajectories: list[Trajectory]
    reward: float | list[float] | None = None

    def row_rewards(self) -> list[float] | list[None]:
        """Return the reward of each trajectory. A session's reward goes to the last one."""
        if self.reward is None:
            return [None] * len(self.trajectories)
        if isinstance(self.reward, list):
            return self.reward
        return [0.0] * (len(self.trajectories) - 1) + [self.reward]


def read_result(result: object, session: Session) -> SessionResult:
    """Parse a loop's result. Raise SessionError if it is invalid."""
    is_pair = issubclass(type(result), tuple) and len(cast(tuple[Any, ...], result)) == 2
    returned, reward = cast(tuple[Any, Any], result) if is_pair else (result, None)
    opened = session.trajectories
    listed: list[Trajectory] = [t for t in opened if t.sampled_tokens]
    if returned is not None:
        listed = cast(list[Trajectory], returned if isinstance(returned, list) else [returned])
    for item in listed:
        if not isinstance(item, Trajectory):
            raise SessionError(f"returned a {type(item).__name__}; {_EXPECTED}")
        if not any(item is t for t in opened):
            raise SessionError("returned a trajectory that its session did not open")
    if len({id(item) for item in listed}) < len(listed):
        raise SessionError("returned the same trajectory twice")
    if isinstance(reward, list):
        if len(reward) != len(listed):
            raise SessionError(f"returned {len(reward)} rewards for {len(listed)} trajectories")
        for trajectory, value in zip(listed, reward, strict=True):
            trajectory.reward = _number(value)
    kept = [t for t in listed if t.sampled_tokens]
    if not kept:
        full = next((t for t in opened if t.finish == "context"), None)
        if full is None:
            raise SessionError("left no trajectory with sampled tokens")
        room = f"the prompt ({len(full)} tokens) leaves no room in the context ({session.context})"
        raise SessionError(f"could not start: {room}")
    for trajectory in kept:
        session.require_known(trajectory.prompt_ids)
        for piece in trajectory.pieces:
            if not piece.sampled:
                session.require_known(piece.ids.tolist())
    if reward is not None and not isinstance(reward, list):
        return SessionResult(kept, _number(reward))
    rewarded = [t for t in listed if t.reward is not None]
    if any(not t.sampled_tokens for t in rewarded):
        raise SessionError("rewarded a trajectory without sampled tokens")
    if rewarded and len(rewarded) < len(kept):
        missing = f"rewarded {len(rewarded)} of {len(kept)} trajectories"
        raise SessionError(f"{missing}: reward each of them, or the session")
    return SessionResult(kept, [_number(t.reward) for t in kept] if rewarded else None)


def _number(reward: object) -> float:
    number = finite_number(reward)
    if number is None:
        raise SessionError(f"returned the reward {short_repr(reward)}; expected a finite number")
    return number


_LOOPS_OWN = (SessionError, ToolError)
"""Errors that are the loop's fault."""
MESSAGES = {"retry": "That is not right. Try again.", "compress": "Summarise what matters for going on."}
"""Defaults of agent.message, by loop."""
_CLEANUP_S = 1.0
"""Seconds to wait for a cancelled loop to end."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A session to run: its prompt, number and sampling settings."""

    prompt: Prompt
    session: int
    sampling: Sampling
    is_baseline: bool = False


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The result of an attempt, or the reason of its failure, and the number of retries."""

    result: SessionResult | None
    failure: str | None
    retries: int
    trace: str | None = None
    """The traceback of a loop that raised."""


_Fault = tuple[str, str | None]
"""A loop's fault, and the traceback if it raised."""


async def run_attempt(
    loop: Loop,
    agent: Agent,
    make: Callable[[int], Session],
    deadline_s: float,
    then: Callable[[AttemptResult], Awaitable[None] | None] | None = None,
) -> AttemptResult:
    """Run a session with the agent loop, with retries if the recipe allows. `make` opens try number n.

    Errors of the loop and missed deadlines are failures of the session. Errors of the engine are raised. The
    work that `then` returns for the result is awaited.
    """
    tries = 1 + RETRIES * (agent.on_failure == "retry")
    outcome, number = ("had no try", None), 0
    for number in range(tries):
        session = make(number)
        name = f"agent loop {agent.loop} in prompt {session.prompt.uid}/session {session.index}"
        task = asyncio.ensure_future(loop(session))
        if isinstance(task, asyncio.Task):
            task.set_name(name)
        try:
            done, _ = await asyncio.wait({task}, timeout=deadline_s)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_CLEANUP_S)
        if done:
            outcome = _outcome(task, session, name)
        else:
            stays = "" if task.done() else ", and did not end when it was cancelled"
            outcome = f"was not done after agent.deadline_s = {deadline_s:g} s{stays}", None
        if isinstance(outcome, SessionResult):
            break
    if isinstance(outcome, SessionResult):
        ended = AttemptResult(outcome, None, number)
    else:
        ended = AttemptResult(None, f"agent loop {agent.loop} {outcome[0]}", number, outcome[1])
    if then is not None and (work := then(ended)) is not None:
        await work
    return ended


def _outcome(task: asyncio.Future[Any], session: Session, name: str) -> SessionResult | _Fault:
    """Return the session's result or the loop's fault. Raise errors that are not the loop's."""
    if task.cancelled():
        return "cancelled itself", None
    if (error := task.exception()) is not None:
        causes = list(_causes(error))
        for cause in causes:
            is_ours = isinstance(cause, PracticumError) and type(cause).__module__.startswith("practicum.")
            if is_ours and not isinstance(cause, _LOOPS_OWN):
                cause.add_note(f"raised in {name}")
                raise cause
        return f"raised {error_line(causes[0])}{raised_at(causes[0])}", trace(error)
    try:
        return read_result(task.result(), session)
    except SessionError as error:
        return str(error), None
    except BaseException as error:  # reading a user's value may raise anything
        return f"returned what can't be read: it raised {error_line(error)}", trace(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of an exception group in order, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for cause in error.exceptions:
            yield from _causes(cause)
    else:
        yield error


async def single_turn(session: Session) -> None:
    """Sample one response to the prompt."""
    await session.generate()


async def tool_use(session: Session) -> None:
    """Sample turns and run their tool calls until a turn has none, agent.turns are over or it is full."""
    results: list[Message] = []
    for left in reversed(range(session.agent.turns)):
        turn = await session.generate(results or None)
        if turn.finish == "context" or not left:
            return
        results = await answer_calls(session, turn.text)
        if not results:
            return


async def answer_calls(session: Session, text: str) -> list[Message]:
    """Run all tool calls of a turn concurrently, and return a message with the result of each, in order."""
    tools = session.toolbox.tools if session.toolbox is not None else []
    calls = read_calls(text, session.agent.tool_call_format, tools)
    return await gather_all(_answer(session, call) for call in calls)


async def _answer(session: Session, call: Call | BadCall) -> Message:
    if isinstance(call, BadCall):
        session.trajectory.tool_calls += 1
        session.trajectory.tool_errors += 1
        return tool_result("error", call.reason)
    return tool_result(call.name, (await session.tool(call.name, call.arguments)).text)


async def retry(session: Session) -> None:
    """Sample up to agent.turns responses, with agent.message between, until the checker accepts one."""
    if session.check is None:
        raise EngineError(f"agent loop retry needs a checker, and task {session.prompt.task} has none")
    turn = await session.generate()
    for _ in range(session.agent.turns - 1):
        if turn.finish == "context" or session.check(turn.text) >= 1.0:
            return
        turn = await session.generate([user(session.agent.message or MESSAGES["retry"])])


async def compress(session: Session) -> None:
    """Run turns and tool calls like tool_use. When the context is full, ask the model for a summary
    (agent.message), and open a new trajectory with the prompt and the summary.

    A summary counts as one of agent.turns and is never the last.
    """
    new, ask = list[Message](), user(session.agent.message or MESSAGES["compress"])
    for left in reversed(range(session.agent.turns)):
        full = left > 0 and is_full(session, new)
        turn = await session.generate([*new, ask] if full else new or None)
        if not turn.tokens or not left:
            return
        if full:
            session.new_trajectory([*session.opening, user(turn.text)])
            new = []
        elif turn.finish == "context" or not (new := await answer_calls(session, turn.text)):
            return


def is_full(session: Session, new: list[Message]) -> bool:
    """Return True if the current context, which has a turn of the model, should be summarised.

    The threshold is agent.compress_at tokens. By default, it is a context without room for the new messages,
    another turn and an eighth more.
    """
    if not session.trajectory.turns:
        return False
    if session.agent.compress_at is not None:
        return len(session.trajectory) >= session.agent.compress_at
    return session.room_after(new or None) < session.sampling.max_new_tokens + session.context // 8


LOOPS: dict[str, Loop] = {
    "single_turn": single_turn,
    "tool_use": tool_use,
    "retry": retry,
    "compress": compress,
}


def find_loop(name: str | CommandLoop | FunctionLoop) -> Loop:
    """Return a built-in loop, a user's `package.module:function`, or an agent behind an HTTP endpoint."""
    if isinstance(name, CommandLoop):
        return partial(run_command, name)
    if isinstance(name, FunctionLoop):
        check_function(name)
        return partial(run_function, name)
    if name in LOOPS:
        return LOOPS[name]
    function = find_function("loop", name, LOOPS, "agent.loop")
    if not inspect.iscoroutinefunction(function):
        raise RecipeError("agent.loop", repr(name), "a coroutine function", "declare it `async def`")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise RecipeError("agent.loop", f"{name!r}: {error}", "a function of one session") from None
    return function
