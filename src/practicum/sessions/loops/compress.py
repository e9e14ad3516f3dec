"""compress: tool_use that goes on in a new context, from a summary, when the old one is full."""

from __future__ import annotations

from practicum.sessions.chat import user
from practicum.sessions.loops.tool_use import answer_calls
from practicum.sessions.session import Session
from practicum.tasks.messages import Message


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
