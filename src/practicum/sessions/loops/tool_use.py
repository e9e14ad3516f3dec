"""tool_use: the model calls tools until it writes a turn without a call."""

from __future__ import annotations

from practicum.concurrency.gather import gather_all
from practicum.sessions.chat import tool_result
from practicum.sessions.session import Session
from practicum.sessions.tools.tool_calls import BadCall, Call, read_calls
from practicum.tasks.messages import Message


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
