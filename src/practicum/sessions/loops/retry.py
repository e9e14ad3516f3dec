"""retry: a wrong answer gets feedback and another try."""

from __future__ import annotations

from practicum.errors import EngineError
from practicum.sessions.chat import user
from practicum.sessions.session import Session


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
