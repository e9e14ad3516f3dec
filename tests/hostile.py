"""A zoo of what users' functions may raise and return; each must be described, never passed through."""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from practicum.errors import EngineError, PracticumError
from practicum.tasks.draws import Draws
from practicum.tasks.procedural import Example, Procedural, Settings


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Quits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Rootless(Exception):
    """Does not say where it was raised."""

    @property
    def __traceback__(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise RuntimeError("no traceback")


class Closed(Exception):
    """Has no attributes at all."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no attributes")


class Strange(Exception):
    """Neither its class nor its equals are known."""

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("no class")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    def __hash__(self) -> int:
        raise RuntimeError("no hash")


class Hidden(BaseExceptionGroup[Exception]):
    @property
    def exceptions(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("no exceptions")


class Ours(PracticumError):
    """A user's own kind of our errors."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


class Circular:
    def __repr__(self) -> str:
        return repr(self)


class Liar:
    """Even asking for its class raises."""

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("no class")


class Grudging:
    def __getattr__(self, name: str) -> Any:
        raise OSError("nothing here")


class Undecided:
    """Neither a number nor a length nor true nor equal to anything."""

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")


class Number(int):
    """A whole number that can't be a float."""

    def __float__(self) -> float:
        raise SystemExit(4)


class Endless(list[Any]):
    def __len__(self) -> int:
        raise RuntimeError("no length")


class Short(list[Any]):
    """Says that it has an item, and has none."""

    def __len__(self) -> int:
        return 1


class Text(str):
    """A text that can't be written, and says that it is short."""

    def __str__(self) -> str:
        return self

    def __len__(self) -> int:
        return 0

    def encode(self, *_: Any) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("no bytes")


class Unawaitable:
    def __await__(self) -> Any:
        raise RuntimeError("not to be awaited")


async def _one() -> float:
    return 1.0


async def _two() -> Any:
    return _one()


def _numbers() -> Any:
    yield 1.0


def _nested() -> list[Any]:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


ERRORS: dict[str, Callable[[], BaseException]] = {
    "surrogate": lambda: ValueError("lone \ud800 here"),
    "mute": Mute,
    "quits": Quits,
    "rootless": Rootless,
    "closed": Closed,
    "strange": Strange,
    "group": lambda: BaseExceptionGroup("several", [Mute(), ValueError("\udfff")]),
    "hidden": lambda: Hidden("several", [ValueError()]),
    "ours": Ours,
    "exit": lambda: SystemExit(0),
    "interrupt": lambda: KeyboardInterrupt("not Ctrl-C"),
    "generator": lambda: GeneratorExit("over"),
    "stop": lambda: StopAsyncIteration("over"),
    "memory": MemoryError,
    "unwritable args": lambda: ValueError(Nameless(), "\ud800"),
    "lines": lambda: ValueError("a\nb"),
    "nul": lambda: ValueError("a\0b"),
    "huge": lambda: ValueError("x\n" * 30_000),
}
VALUES: dict[str, Callable[[], Any]] = {
    "masked": lambda: np.ma.masked,
    "masked array": lambda: np.ma.array([1.0], mask=[True])[0],
    "meta": lambda: torch.zeros((), device="meta"),
    "not a number": lambda: torch.tensor(float("nan")),
    "complex": lambda: 1j,
    "too large": lambda: 1e39,
    "huge": lambda: 10**5000,
    "date": lambda: np.datetime64("NaT"),
    "text": lambda: "\ud800",
    "unwritable": lambda: Text("x"),
    "nameless": Nameless,
    "circular": Circular,
    "liar": Liar,
    "grudging": Grudging,
    "undecided": Undecided,
    "number": lambda: Number(3),
    "endless": Endless,
    "short": Short,
    "nested": _nested,
    "generator": _numbers,
    "coroutine": _two,
    "unawaitable": Unawaitable,
}
ZOO = [*(f"raise:{name}" for name in ERRORS), *(f"return:{name}" for name in VALUES)]


def meet(what: str) -> Any:
    """Raises or returns one of the zoo."""
    kind, _, name = what.partition(":")
    if kind == "raise":
        raise ERRORS[name]()
    return VALUES[name]()


def judge(sample: Any) -> Any:
    """Raises or returns by the text of the answer."""
    return meet(sample.response_text)


async def judge_async(sample: Any) -> Any:
    return meet(sample.response_text)


def judge_batch(samples: Any) -> Any:
    return meet(samples[0].response_text)


def tool(what: str) -> Any:
    """Raises or returns by its argument."""
    return meet(what)


def always(sample: Any) -> float:
    """Raises what nobody can write down or send."""
    raise ERRORS["surrogate"]() from Mute()


async def hostile_loop(session: Any) -> Any:
    """Raises in the first session, returns in the second what can't be read, and works in the others."""
    await session.generate()
    if session.index == 0:
        meet("raise:mute")
    return Liar() if session.index == 1 else None


async def uses_a_tool(session: Any) -> None:
    """One turn, after a tool of the user's that raises."""
    await session.tool("tool", {"what": "raise:mute"})
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
    "text": (lambda s: s.generate("\ud800"), r"half of a surrogate pair \('\\ud800' at character 1\)"),
    "message": (lambda s: s.generate([Nameless()]), "whose repr\\(\\) raised RuntimeError> among messages"),
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


def leaves(sample: Any) -> float:
    """Goes to a folder of its own, which is gone then: as code that runs other code does."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    return float(len(sample.response_text) % 2)


def meddles(sample: Any) -> float:
    """Changes what a process has one of, and goes away."""
    os.environ["OMP_NUM_THREADS"] = "7"
    for name in ("HOME", "PATH"):
        os.environ.pop(name, None)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    sys.stdout = sys.stderr = io.StringIO()
    threading.Thread(target=RELEASED.wait, args=(60,)).start()
    return lasting(sample)


def lasting(sample: Any) -> float:
    """As `meddles` scores."""
    return sum(map(ord, sample.response_text)) % 7 / 6


def closes_stdout(sample: Any) -> float:
    sys.stdout.close()
    return lasting(sample)


def changes_dtype(sample: Any) -> float:
    torch.set_default_dtype(torch.float64)
    return lasting(sample)


async def changes_dtype_async(sample: Any) -> float:
    return changes_dtype(sample)


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


async def raises_ours(session: Any) -> None:
    raise EngineError("the engine said \ud800")


def map_that_exits(row: Any) -> Any:
    raise SystemExit(0)


def map_that_lies(row: Any) -> Any:
    return {"prompt": Liar(), "answer": "1"}


def map_that_holds(row: Any) -> Any:
    return row | {"lock": threading.Lock()}


def exiting_schedule(step: int, train: Any) -> float:
    raise SystemExit(0)


def _sometimes_broken(draws: Draws, settings: Settings) -> Example:
    number = str(draws.below(10**6))
    return Example(f"{number}=" + ("" if draws.below(3) else "\ud800"), number)


SOMETIMES_BROKEN = Procedural("sometimes_broken", "a number again", {}, _sometimes_broken)
