"""Agent loops of the museum's recipes."""

from random import Random

from practicum.sessions.session import Session


async def two_contexts(session: Session) -> None:
    """Two turns with tokens of a tool between them; odd sessions have another context after it."""
    for _ in range(1 + session.index % 2):
        if session.trajectory.turns:
            session.new_trajectory()
        await session.generate(max_new_tokens=2)
        await session.generate(session.tokenizer.encode("|so|", add_special_tokens=False))


async def a_word_and_an_answer(session: Session) -> None:
    """One token, then an answer: the engine keeps what it computed of the prompt."""
    session.new_trajectory(session.tokenizer.encode("copy:ab=", add_special_tokens=False))
    await session.generate(max_new_tokens=1)
    await session.generate("ab")


async def turns_of_many_lengths(session: Session) -> None:
    """Three or four turns with tokens of a tool between them."""
    draw, tool = Random(f"{session.prompt.uid} {session.index}"), None
    for _ in range(draw.randint(3, 4)):
        await session.generate(tool, max_new_tokens=draw.randint(4, 16), stop=())
        tool = "=ab;"


async def one_is_left(session: Session) -> None:
    """All sessions of every second prompt fail but one."""
    await session.generate()
    if session.prompt.uid % 2 and session.index:
        raise ValueError("it does not like it")
