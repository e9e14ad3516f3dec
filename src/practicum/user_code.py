"""Describe errors and values of users' code: one line, the user's frames, a finite number. No torch."""

from __future__ import annotations

import math
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

FLOAT32_MAX = 3.4028234e38
_OURS = (str(Path(__file__).parent), "<frozen importlib", "<frozen runpy")
_MACHINERY = tuple(
    str(Path(traceback.__file__).parent / name) for name in ("asyncio", "importlib", "threading.py")
)
_LIBRARIES = ("<frozen", *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")))
_SHOWN_FRAMES = 8
_SHOWN_CHARS = 300
"""Maximum characters of a line of code on the screen."""
_KEPT_CHARS = 20_000
"""Maximum characters of a traceback in log.txt."""


def shorten(text: str, limit: int = 200) -> str:
    """Return the text, or its beginning and end if it is longer than the limit."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"


def short_repr(value: Any, limit: int = 200) -> str:
    return shorten(repr(value), limit)


def error_line(error: BaseException) -> str:
    message = shorten(" ".join(str(error).split()))
    return f"{type(error).__name__}{': ' if message else ''}{message}"


def raised_at(error: BaseException | None) -> str:
    """Return where a user's error was raised, as " (rewards.py, line 12)", or "" if unknown."""
    frames = [] if error is None else _user_frames(traceback.extract_tb(error.__traceback__))
    written = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    for frame in (written or frames)[-1:]:
        return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def frames(error: BaseException, indent: str = "  ") -> str:
    """Return the user's frames for the screen, without practicum's and the middle of a deep stack."""
    more = traceback.format_exception_only(error)[:-1] if isinstance(error, SyntaxError) else ()
    return _shown(traceback.extract_tb(error.__traceback__), indent, more)


def running_frames(thread: int, indent: str = "  ") -> str:
    """Return the user's frames of a running thread, as `frames` does."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else _shown(traceback.extract_stack(frame), indent)


def trace(error: BaseException) -> str:
    """Return the full traceback for log.txt, with the errors that caused it."""
    return shorten("".join(traceback.format_exception(error)).rstrip(), _KEPT_CHARS)


def user_lines(trace: str) -> list[str]:
    """Return the lines of a traceback without frames of practicum and without the error's message."""
    lines, ours, prefixes = [], False, tuple(f'  File "{path}' for path in _OURS)
    for line in trace.splitlines()[:-1]:
        if not line.startswith("    "):
            ours = line.startswith(prefixes)
        if not ours:
            lines.append(line)
    return lines


def finite_number(value: Any) -> float | None:
    """Return a number, or a scalar of numpy or torch, as a float, or None unless it is a finite float32."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # an integer that is too large for a float
        return None
    return number if math.isfinite(number) and abs(number) <= FLOAT32_MAX else None


def encodable(text: str) -> str:
    """Return the text with "?" for lone surrogates, which tokenizers reject."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _user_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames from the user's first one on, without those of practicum."""
    user_frames = [frame for frame in stack if not frame.filename.startswith(_OURS)]
    while user_frames and user_frames[0].filename.startswith(_MACHINERY):
        del user_frames[0]
    return user_frames


def _shown(stack: traceback.StackSummary, indent: str, more: Sequence[str] = ()) -> str:
    blocks = traceback.StackSummary.from_list(_user_frames(stack)).format()
    if (left_out := len(blocks) - _SHOWN_FRAMES) > 0:
        blocks[2 : 2 + left_out] = [f"  … {left_out} more"]
    lines = [line for block in (*blocks, *more) for line in block.splitlines()]
    return "\n".join(f"{indent}{shorten(line, _SHOWN_CHARS)}" for line in lines)
