"""single_turn: one prompt, one answer."""

from __future__ import annotations

from practicum.sessions.session import Session


async def single_turn(session: Session) -> None:
    """One prompt, one answer."""
    await session.generate()
