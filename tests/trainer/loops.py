"""Agent loops that recipes in tests name."""

from practicum.rollout.session import Session, Trajectory


async def two_trajectories(session: Session) -> list[Trajectory]:
    """A turn, tokens that a tool gave, another turn; then a second context."""
    first = session.new_trajectory()
    await session.generate(first, max_new_tokens=2)
    first.add_given(session.tokenizer.encode("given", add_special_tokens=False))
    await session.generate(first, max_new_tokens=2)
    second = session.new_trajectory()
    await session.generate(second)
    return [first, second]
