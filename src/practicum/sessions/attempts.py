"""Attempts at a prompt: an agent loop runs a session, what it returned is read, a failed one is tried again.

A loop is `async def loop(session)`; the built-in ones are at the end.
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
from practicum.recipe.schema.rollout_sections import Agent, CommandLoop, FunctionLoop, Retry
from practicum.sessions.endpoint.programs import check_function, run_command, run_function
from practicum.sessions.session import Session, Trajectory
from practicum.sessions.tools.tool import ToolError
from practicum.sessions.tools.tool_calls import BadCall, Call, read_calls
from practicum.tasks.messages import Message, tool_result, user
from practicum.tasks.prompts import Prompt
from practicum.user_code import error_line, finite_number, raised_at, short_repr, trace

Loop = Callable[[Session], Awaitable[Any]]
"""Returns None (all trajectories that have sampled tokens), a trajectory, a list of them, or one of these
with a reward: a number for the session, or a list with one number for each trajectory."""

_EXPECTED = "expected None, a Trajectory, a list of them, or (trajectories, reward)"


@dataclass(frozen=True, slots=True)
class SessionResult:
    """A session's trajectories in order, all with sampled tokens, and its reward if the loop gave one."""

    trajectories: list[Trajectory]
    reward: float | list[float] | None = None

    def row_rewards(self) -> list[float] | list[None]:
        """What each trajectory earned; a reward of the whole session is earned by the last one."""
        if self.reward is None:
            return [None] * len(self.trajectories)
        if isinstance(self.reward, list):
            return self.reward
        return [0.0] * (len(self.trajectories) - 1) + [self.reward]


def read_result(result: object, session: Session) -> SessionResult:
    """What the loop returned for the session; a SessionError if it is not what a loop may return."""
    is_pair = issubclass(type(result), tuple) and len(cast(tuple[Any, ...], result)) == 2
    returned, reward = cast(tuple[Any, Any], result) if is_pair else (result, None)
    listed = _listed(returned, session)
    if isinstance(reward, list) and len(reward) != len(listed):
        raise SessionError(f"returned {len(reward)} rewards for {len(listed)} trajectories")
    kept = [t for t in listed if t.sampled_tokens]
    if not kept:
        raise SessionError(_nothing_sampled(session))
    for trajectory in kept:
        session.require_known(trajectory.prompt_ids)
        for piece in trajectory.pieces:
            if not piece.sampled:
                session.require_known(piece.ids.tolist())
    if reward is not None and not isinstance(reward, list):
        return SessionResult(kept, _number(reward))
    if reward is not None:
        for trajectory, value in zip(listed, reward, strict=True):
            trajectory.reward = _number(value)
    return SessionResult(kept, _own_rewards(listed))


def _nothing_sampled(session: Session) -> str:
    """Why the model wrote nothing."""
    full = next((t for t in session.trajectories if t.finish == "context"), None)
    if full is not None:
        return f"had no room for an answer: prompt of {len(full)} tokens, context {session.context}"
    return "left no trajectory with sampled tokens"


def _listed(returned: object, session: Session) -> list[Trajectory]:
    opened = session.trajectories
    if returned is None:
        return [t for t in opened if t.sampled_tokens]
    listed: list[Trajectory] = []
    for item in returned if isinstance(returned, list) else [returned]:
        if not isinstance(item, Trajectory):
            raise SessionError(f"returned a {type(item).__name__}; {_EXPECTED}")
        if not any(item is t for t in opened):
            raise SessionError("returned a trajectory that its session did not open")
        listed.append(item)
    if len({id(item) for item in listed}) < len(listed):
        raise SessionError("returned the same trajectory twice")
    return listed


def _own_rewards(listed: list[Trajectory]) -> list[float] | None:
    """The trajectories' own rewards, if they have them."""
    rewarded = [t for t in listed if t.reward is not None]
    if not rewarded:
        return None
    if any(not t.sampled_tokens for t in rewarded):
        raise SessionError("rewarded a trajectory without sampled tokens")
    kept = [t for t in listed if t.sampled_tokens]
    if len(rewarded) < len(kept):
        raise SessionError(
            f"rewarded {len(rewarded)} of {len(kept)} trajectories: reward each of them, or the session"
        )
    return [_number(t.reward) for t in kept]


def _number(reward: object) -> float:
    number = finite_number(reward)
    if number is None:
        raise SessionError(f"returned the reward {short_repr(reward)}; expected a finite number")
    return number


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


def _no_more_work(result: AttemptResult) -> None:
    """The default of `run_attempt`: nothing follows an attempt."""


async def run_attempt(
    loop: Loop,
    agent: Agent,
    make: Callable[[int], Session],
    deadline_s: float,
    then: Callable[[AttemptResult], Awaitable[None] | None] = _no_more_work,
) -> AttemptResult:
    """Run a session by the loop, again if it fails and the recipe says so; `make` opens try number n.

    An error of the loop is the session's failure, so is passing the deadline. Trouble of the engine is not
    the loop's and is raised. The work that `then` returns for the result is done before this ends.
    """
    tries = 1 + (agent.on_failure.retry if isinstance(agent.on_failure, Retry) else 0)
    fault, result, number = _Fault("had no try"), None, 0
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
        outcome = _outcome(task, session, name) if done else _late(task, deadline_s)
        if isinstance(outcome, SessionResult):
            result = outcome
            break
        fault = outcome
    failure = None if result is not None else f"agent loop {agent.loop} {fault.failure}"
    ended = AttemptResult(result, failure, number, None if result is not None else fault.trace)
    if (work := then(ended)) is not None:
        await work
    return ended


def _late(task: asyncio.Future[Any], deadline_s: float) -> _Fault:
    stays = "" if task.done() else ", and did not end when it was cancelled"
    return _Fault(f"was not done after agent.deadline_s = {deadline_s:g} s{stays}")


def _outcome(task: asyncio.Future[Any], session: Session, name: str) -> SessionResult | _Fault:
    """Return the session's result, or what the loop did wrong. `name` is for errors of others."""
    if task.cancelled():
        return _Fault("cancelled itself")
    if (error := task.exception()) is not None:
        return _fault(error, name)
    try:
        return read_result(task.result(), session)
    except SessionError as error:
        return _Fault(str(error))
    except BaseException as error:  # whatever a user's value does when it is read
        return _Fault(f"returned what can't be read: it raised {error_line(error)}", trace(error))


def _fault(error: BaseException, name: str) -> _Fault:
    """What the loop raised, in words; the first of a group. Raises it if it is not the loop's fault."""
    try:
        causes = list(_causes(error))
    except BaseException:  # a group of the user's that does not say what is in it
        causes = [error]
    for cause in causes:
        if _is_ours(cause) and not issubclass(type(cause), _LOOPS_OWN):
            cause.add_note(f"raised in {name}")
            raise cause
    return _Fault(f"raised {error_line(causes[0])}{raised_at(causes[0])}", trace(error))


def _is_ours(error: BaseException) -> bool:
    """Whether an error is practicum's; classes that users derive from ours are theirs."""
    return issubclass(type(error), PracticumError) and type(error).__module__.startswith("practicum.")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group, as task groups raise them, in order; else the error itself."""
    if not issubclass(type(error), BaseExceptionGroup):
        yield error
        return
    assert isinstance(error, BaseExceptionGroup)
    for cause in error.exceptions:
        yield from _causes(cause)


async def single_turn(session: Session) -> None:
    """One prompt, one answer."""
    await session.generate()


async def tool_use(session: Session) -> None:
    """Turns, each followed by the results of its tool calls; the turn without a call is the answer.

    Ends after agent.turns turns too, or when the context is full.
    """
    results: list[Message] = []
    for left in reversed(range(session.agent.turns)):
        turn = await session.generate(results or None)
        if turn.finish == "context" or not left:
            return
        results = await answer_calls(session, turn.text)
        if not results:
            return


async def answer_calls(session: Session, text: str) -> list[Message]:
    """Run all tool calls of a turn at once; their results in order, one message each.

    A call that can't be read is answered with the reason.
    """
    tools = session.toolbox.tools if session.toolbox is not None else []
    calls = read_calls(text, session.agent.calls, tools)
    return await gather_all(_answer(session, call) for call in calls)


async def _answer(session: Session, call: Call | BadCall) -> Message:
    if isinstance(call, BadCall):
        session.trajectory.tool_calls += 1
        session.trajectory.tool_errors += 1
        return tool_result("error", call.reason)
    ran = await session.tool(call.name, call.arguments)
    return tool_result(call.name, ran.text)


async def retry(session: Session) -> None:
    """Answers until the task's checker says that one is right, in agent.turns tries; the last one counts.

    After a miss the model reads agent.feedback, and nothing else about what was wrong.
    """
    if session.check is None:
        raise EngineError(f"agent loop retry needs a checker, and task {session.prompt.task} has none")
    turn = await session.generate()
    for _ in range(session.agent.turns - 1):
        if turn.finish == "context" or session.check(turn.text) >= 1.0:
            return
        turn = await session.generate([user(session.agent.feedback)])


async def compress(session: Session) -> None:
    """Turns and tool calls as in tool_use. In a context that is full the model is asked for a summary
    (agent.ask_summary), and a new trajectory opens with the prompt and the summary.

    A summary is one of the agent.turns turns, and never the last one.
    """
    new: list[Message] = []
    for left in reversed(range(session.agent.turns)):
        full = left > 0 and is_full(session, new)
        turn = await session.generate([*new, user(session.agent.ask_summary)] if full else new or None)
        if not turn.tokens or not left:
            return
        if full:
            session.new_trajectory([*session.opening, user(turn.text)])
            new = []
        elif turn.finish == "context" or not (new := await answer_calls(session, turn.text)):
            return


def is_full(session: Session, new: list[Message]) -> bool:
    """Whether the current context, in which the model has had a turn, should be summed up.

    From agent.compress_at tokens on; by default when, after what is new, it has no room for another turn and
    an eighth more.
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
    """A built-in loop, a user's `package.module:function`, or an agent behind an HTTP endpoint."""
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
