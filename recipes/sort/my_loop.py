"""An agent's loop: the model tries, looks at its own answer, and tries again in a fresh context."""

from practicum.sessions.session import Session


async def second_thoughts(session: Session):
    assert session.check is not None  # rows without an answer have no checker
    first = await session.generate()
    if session.check(first.text) == 1:  # the task's checker
        return session.trajectory, 1.0  # a reward of the loop's own
    doubt = session.fork()  # continues from here; what came before is trained once
    await doubt.generate("\nno: ")
    session.new_trajectory()  # the prompt again, nothing else
    last = await session.generate()
    return session.trajectories, session.check(last.text) / 2
