"""Errors and values of users' functions that must be named as failures, never passed through."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def _numbers() -> Any:
    yield 1.0


ERRORS: dict[str, Callable[[], BaseException]] = {
    "group": lambda: BaseExceptionGroup("several", [KeyError("a"), ValueError("b")]),
    "exit": lambda: SystemExit(0),
    "interrupt": lambda: KeyboardInterrupt("not Ctrl-C"),
    "generator": lambda: GeneratorExit("over"),
    "stop": lambda: StopAsyncIteration("over"),
    "lines": lambda: ValueError("a\nb"),
    "huge": lambda: ValueError("x\n" * 30_000),
}
VALUES: dict[str, Callable[[], Any]] = {
    "list": lambda: ["x"],
    "not a number": lambda: torch.tensor(float("nan")),
    "complex": lambda: 1j,
    "too large": lambda: 1e39,
    "date": lambda: np.datetime64("NaT"),
    "text": lambda: "\ud800",
    "generator": _numbers,
}
ZOO = [*(f"raise:{name}" for name in ERRORS), *(f"return:{name}" for name in VALUES)]


def meet(what: str) -> Any:
    """Raises or returns one of the zoo."""
    kind, _, name = what.partition(":")
    if kind == "raise":
        raise ERRORS[name]()
    return VALUES[name]()


def tool(what: str) -> Any:
    """Raises or returns by its argument."""
    return meet(what)


def always(sample: Any) -> float:
    raise ValueError("always") from KeyError("its cause")


async def hostile_loop(session: Any) -> Any:
    """Raises in the first session, returns a wrong type in the second, and works in the others."""
    await session.generate()
    if session.index == 0:
        meet("raise:lines")
    return 1j if session.index == 1 else None


async def uses_a_tool(session: Any) -> None:
    """One turn, after a tool of the user's that raises."""
    await session.tool("tool", {"what": "raise:lines"})
    await session.generate()


async def needs_a_tool(session: Any) -> None:
    await session.tool("search", {"query": "x"})


async def _adds_by_hand(session: Any) -> None:
    await session.generate()
    session.trajectory.add_given([10**9])


async def _stops_the_event_loop(session: Any) -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    raise ValueError("it goes on")


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "ids": (lambda s: s.generate([10**9]), "token id 1000000000 is outside of the model's vocabulary"),
    "negative ids": (lambda s: s.generate([-1]), "token id -1 is outside"),
    "ids of a context": (lambda s: s.new_trajectory([10**30]), "is outside of the model's vocabulary"),
    "ids by hand": (_adds_by_hand, "token id 1000000000 is outside"),
    "message": (lambda s: s.generate([object()]), "among messages"),
    "part of a token": (lambda s: s.generate(max_new_tokens=2.5), "raised TypeError"),
    "stop": (lambda s: s.generate(stop=["x"]), "raised TypeError"),
    "stopped": (_stops_the_event_loop, "raised ValueError: it goes on"),
}
"""What a loop may ask of its session that can't be, and what is said then."""
CASES = [
    *(("loop", what) for what in ZOO),
    *(("loop's reward", what) for what in ZOO if what.startswith("return")),
    *(("fault", name) for name in FAULTS),
    *((where, what) for where in ("reward", "async reward") for what in ZOO),
]
"""What goes wrong in the sessions of a prompt, by their numbers: where, and which of the zoo."""
SESSIONS = len(CASES) + 4
"""Sessions of a prompt, with some that go well."""


async def zoo_loop(session: Any) -> Any:
    """By the session's number the loop fails, or it goes through; the last ones call all tools of the zoo."""
    where, what = CASES[session.index] if session.index < len(CASES) else ("", "")
    if where == "fault":
        made = FAULTS[what][0](session)
        return await made if asyncio.iscoroutine(made) else made
    await session.generate(max_new_tokens=2)
    if where == "loop":
        return meet(what)
    if where == "loop's reward":
        return None, meet(what)
    if not where:
        told = [await session.tool("tool", {"what": one}) for one in ZOO]
        await session.generate(told[ZOO.index("return:text")].text)
    return None


def _reward(where: str, key: str) -> Any:
    found = re.match(r"prompt \d+/session (\d+)/", key)
    number = SESSIONS if found is None else int(found[1])  # another key: a made-up answer
    case = CASES[number] if number < len(CASES) else ("", "")
    return meet(case[1]) if case[0] == where else 1.0


def zoo_reward(sample: Any) -> Any:
    """By the session's number one of the zoo, or 1."""
    return _reward("reward", sample.key)


async def zoo_reward_async(sample: Any) -> Any:
    return _reward("async reward", sample.key)


BLOCKED, RELEASED = threading.Event(), threading.Event()


def block() -> None:
    """Keeps its thread until the test lets it go."""
    BLOCKED.set()
    RELEASED.wait(60)


async def blocking_reward(sample: Any) -> float:
    block()
    return 1.0


async def blocking_loop(session: Any) -> None:
    block()


async def blocking_tool(what: str) -> str:
    """Blocks."""
    block()
    return what
