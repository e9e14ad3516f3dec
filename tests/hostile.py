"""A zoo of what users' functions may raise and return; each must be described, never passed through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Quits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


class Liar:
    """Even asking for its class raises."""

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("no class")


class Grudging:
    def __getattr__(self, name: str) -> Any:
        raise OSError("nothing here")


class Endless(list[Any]):
    def __len__(self) -> int:
        raise RuntimeError("no length")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "surrogate": lambda: ValueError("lone \ud800 here"),
    "mute": Mute,
    "quits": Quits,
    "group": lambda: BaseExceptionGroup("several", [Mute(), ValueError("\udfff")]),
    "exit": lambda: SystemExit("bye"),
    "unwritable args": lambda: ValueError(Nameless(), "\ud800"),
    "lines": lambda: ValueError("a\nb"),
}
VALUES: dict[str, Any] = {
    "masked": np.ma.masked,
    "masked array": np.ma.array([1.0], mask=[True])[0],
    "meta": torch.zeros((), device="meta"),
    "nameless": Nameless(),
    "liar": Liar(),
    "grudging": Grudging(),
    "endless": Endless(),
    "surrogate": "\ud800",
    "huge": 10**5000,
}


def throw(name: str) -> None:
    raise ERRORS[name]()


def judge(sample: Any) -> Any:
    """Raises or returns by the text of the answer."""
    kind, _, name = sample.response_text.partition(":")
    return throw(name) if kind == "raise" else VALUES[name]


async def judge_async(sample: Any) -> Any:
    return judge(sample)


def judge_batch(samples: Any) -> Any:
    return judge(samples[0])


def tool(what: str) -> Any:
    """Raises or returns by its argument."""
    kind, _, name = what.partition(":")
    return throw(name) if kind == "raise" else VALUES[name]


def always(sample: Any) -> float:
    """Raises what nobody can write down or send."""
    raise ERRORS["surrogate"]() from Mute()


async def hostile_loop(session: Any) -> Any:
    """Raises in the first session, returns in the second what can't be read, and works in the others."""
    await session.generate()
    if session.index == 0:
        throw("mute")
    return Liar() if session.index == 1 else None


async def uses_a_tool(session: Any) -> None:
    """One turn, after a tool of the user's that raises."""
    await session.tool("tool", {"what": "raise:mute"})
    await session.generate()


async def needs_a_tool(session: Any) -> None:
    await session.tool("search", {"query": "x"})
