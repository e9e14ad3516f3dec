"""Tools as users write them, named in tests by package.module:function."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from practicum.sessions.tools.tool import ToolError

NOT_A_FUNCTION = 7
release = threading.Event()


def weather(city: str, days: int = 1, exact: bool | None = None) -> dict[str, Any]:
    """What the weather
    will be like.

    Args:
        city: Where.
        days (int): How many days ahead.

    More words.
    """
    return {"city": city, "days": days, "exact": exact}


async def total(numbers: list[float], names: dict[str, str] | None = None) -> float:
    """Sums numbers."""
    await asyncio.sleep(0)
    return sum(numbers)


def clock() -> str:
    return "noon"


def long_text(letters: int) -> str:
    return "x" * letters


def broken(text: str) -> str:
    raise ValueError(f"no {text} today")


def refusing(text: str) -> str:
    raise ToolError("ask me something else.")


def hanging(text: str) -> str:
    release.wait(60)
    return text


async def sleeping(text: str) -> str:
    await asyncio.sleep(60)
    return text


def surrogate(text: str) -> str:
    return "\ud800" + text


def packed(*texts: str) -> str:
    return "".join(texts)


def odd(when: complex) -> str:
    return str(when)


def unknown_type(text: Nowhere) -> str:  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    return str(text)
