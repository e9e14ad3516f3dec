"""Agent loops: what happens in a session. A loop is `async def loop(session)`; here are the built-in ones."""

from __future__ import annotations

import inspect

from practicum.concurrency.gather import gather_all
from practicum.errors import EngineError, RecipeError
from practicum.recipe.own_parts import find_function
from practicum.sessions.attempts import Loop
from practicum.sessions.chat import tool_result, user
from practicum.sessions.session import Session
from practicum.sessions.tools.tool_calls import BadCall, Call, read_calls
from practicum.tasks.messages import Message


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


def find_loop(name: str) -> Loop:
    """A built-in loop, or a user's `package.module:function`."""
    if name in LOOPS:
        return LOOPS[name]
    function = find_function("loop", name, LOOPS, "agent.loop")
    if not inspect.iscoroutinefunction(function):
        raise RecipeError("agent.loop", repr(name), "a coroutine function", "declare it `async def`")
    return function
