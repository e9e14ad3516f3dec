"""What the campaign's recipes name: a loop with a tool, and rewards."""

from practicum.rewards.reward_functions import RewardSample
from practicum.sessions.session import Session

_PROGRAM = "import time\ntime.sleep(0.15)\nprint({} * 7 % 10)"
_TRIES = 4


async def agent(session: Session) -> None:
    """A turn, a digit that the Python tool prints, a turn; then a second context in every other session."""
    turn = await session.generate(max_new_tokens=3)
    digit = await _ask(session, sum(turn.tokens))
    await session.generate(session.tokenizer.encode(digit, add_special_tokens=False), max_new_tokens=3)
    if session.index % 2:
        session.new_trajectory()
        await session.generate(max_new_tokens=2)


async def _ask(session: Session, number: int) -> str:
    """What the tool prints. A loop that is to survive its tool's death asks again. Not by `session.tool`,
    whose count of errors is part of the metrics."""
    assert session.toolbox is not None
    said = ""
    for _ in range(_TRIES):
        outcome = await session.toolbox.run("python", {"code": _PROGRAM.format(number)})
        if outcome.ok:
            return outcome.text
        said = outcome.text
    raise RuntimeError(f"the tool failed {_TRIES} times: {said}")


def by_letters(sample: RewardSample) -> float:
    """Differs between almost any two answers."""
    return sum(map(ord, sample.response_text)) % 7 / 6


def coarse(sample: RewardSample) -> float:
    """0 or 1: some groups are flat, and are refilled."""
    return float(sum(map(ord, sample.response_text)) % 3 == 0)
