"""Agent loops that recipes in tests name."""

import asyncio
import os

from practicum.sessions.session import Session, Trajectory

from .kill_orders import is_ordered, obey, order


async def two_trajectories(session: Session) -> list[Trajectory]:
    """A turn, tokens that a tool gave, another turn; then a second context."""
    first = session.trajectory
    await session.generate(max_new_tokens=2)
    await session.generate(session.tokenizer.encode("given", add_special_tokens=False), max_new_tokens=2)
    second = session.new_trajectory()
    await session.generate()
    return [first, second]


async def some_fail(session: Session) -> None:
    """Sessions with an odd number raise after a turn."""
    await session.generate()
    if session.index % 2:
        raise ValueError(f"session {session.index} does not like it")


async def fails_first(session: Session) -> None:
    """Fails by what was sampled: another try draws other tokens."""
    turn = await session.generate()
    if turn.tokens[0] % 2:
        raise ValueError("an odd token")


async def one_hangs(session: Session) -> None:
    """Session 0 never ends."""
    await session.generate()
    if session.index == 0:
        await asyncio.Event().wait()


async def hangs_late(session: Session) -> None:
    """From the third step on, sessions never end."""
    await session.generate()
    if session.prompt.uid >= 8:
        await asyncio.Event().wait()


async def uneven(session: Session) -> None:
    """Sessions leave one to three trajectories, of one or two turns."""
    await session.generate(max_new_tokens=2)
    for number in range(session.index % 3):
        session.new_trajectory()
        await session.generate(max_new_tokens=1 + number)
        await session.generate(session.tokenizer.encode("so", add_special_tokens=False), max_new_tokens=2)


async def rewards_each(session: Session) -> tuple[list[Trajectory], list[float]]:
    """Two trajectories with rewards of their own."""
    await session.generate()
    session.new_trajectory()
    await session.generate()
    return session.trajectories, [0.25, float(session.index)]


async def rewards_all(session: Session) -> tuple[list[Trajectory], float]:
    """A reward of the session."""
    await session.generate()
    session.fork()
    await session.generate("a")
    return session.trajectories, float(session.index)


async def asks_a_helper(session: Session) -> None:
    """A helper works in a context of its own; the answer is the session's own turn after it."""
    helper = session.fork()
    helper.new_trajectory(session.tokenizer.encode("copy", add_special_tokens=False))
    await helper.generate(max_new_tokens=3)
    await session.generate(max_new_tokens=2)


async def mortal(session: Session) -> None:
    """One turn. If it is ordered, session 1 dies when the others had time to be written, or never ends."""
    await session.generate()
    if session.index != 1:
        return
    if is_ordered("rollout"):
        await asyncio.sleep(0.5)
        obey("rollout")
    if is_ordered(f"linger at prompt {session.prompt.uid}"):
        order("lingers")
        await asyncio.Event().wait()


async def crowded(session: Session) -> None:
    """Opens a context that the prompt alone fills."""
    session.new_trajectory("1" * 100)
    await session.generate()


async def notes_itself(session: Session) -> None:
    """A session with a side effect: a line in the file that NOTES names."""
    await session.generate(max_new_tokens=2)
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{session.prompt.uid} {session.index}\n")
    await session.generate(max_new_tokens=2)


async def calculates(session: Session) -> None:
    """A turn, the calculator's result on the number of its tokens, and another turn."""
    turn = await session.generate(max_new_tokens=3)
    outcome = await session.tool("calculator", {"expression": f"{len(turn.tokens)} * {session.index + 7}"})
    result = session.tokenizer.encode(outcome.text, add_special_tokens=False)
    await session.generate(result, max_new_tokens=3)
