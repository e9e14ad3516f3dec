"""What a user's own code did, in words: its errors, values and frames, whatever they are made of. No torch.

An exception whose `__str__` raises, a value whose `__repr__` raises or text with lone surrogates is described
like any other; nothing here raises.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

_OURS = (str(Path(__file__).parent), "<frozen importlib", "<frozen runpy")
_MACHINERY = tuple(str(Path(traceback.__file__).parent / name) for name in ("asyncio", "importlib"))
_SHOWN_FRAMES = 8
_KEPT_CHARS = 20_000


def shorten(text: str, limit: int = 200) -> str:
    """The text, or its beginning and end if it is longer than the limit."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"


def text_of(value: Any) -> str:
    """`str` of anything, as text that can be written and sent; what can't be read is named by its type."""
    return _described(value, str)


def repr_of(value: Any, limit: int = 200) -> str:
    """`repr` of anything, shortened, as text that can be written and sent."""
    return shorten(_described(value, repr), limit)


def type_name(value: Any) -> str:
    """The name of a value's type."""
    return writable(type.__getattribute__(type(value), "__name__"))


def writable(text: str) -> str:
    """The text with lone surrogates, which no file and no wire takes, written as escapes."""
    return str.encode(text, "utf-8", "backslashreplace").decode("utf-8")


def error_line(error: BaseException) -> str:
    """Type and message of a user's error on one line."""
    message = shorten(" ".join(text_of(error).splitlines()))
    return f"{type_name(error)}{': ' if message else ''}{message}"


def place(error: BaseException | None) -> str:
    """Where a user's error was raised, to follow its line: " (rewards.py, line 12)"; empty if not known."""
    own = [] if error is None else _own_frames(error)
    return writable(f" ({Path(own[-1].filename).name}, line {own[-1].lineno})") if own else ""


def frames(error: BaseException, indent: str = "  ") -> str:
    """The user's frames for the screen: file, line and source line of each; empty if there are none.

    Ours are left out, and those in the middle of a deep stack. A syntax error shows the line it is in.
    """
    shown = [line.rstrip("\n") for line in traceback.StackSummary.from_list(_own_frames(error)).format()]
    if len(shown) > _SHOWN_FRAMES:
        left_out = len(shown) - _SHOWN_FRAMES
        shown[2 : 2 + left_out] = [f"  … {left_out} more"]
    if issubclass(type(error), SyntaxError):
        shown += [line.rstrip("\n") for line in traceback.format_exception_only(error)[:-1]]
    return "\n".join(f"{indent}{line}" for block in shown for line in writable(block).splitlines())


def trace(error: BaseException) -> str:
    """The whole traceback for log.txt, with the errors that caused it, without our frames."""
    try:
        found = traceback.TracebackException.from_exception(error)
        _drop_ours(found)
        return _cut(writable("".join(found.format()).rstrip()))
    except BaseException:  # a hostile exception: its frames are what is left
        return _cut(f"{frames(error)}\n{error_line(error)}")


def is_masked(value: Any) -> bool:
    """Whether a value is numpy's masked constant or an array with masked entries."""
    arrays = sys.modules.get("numpy.ma")
    return arrays is not None and bool(arrays.is_masked(value))


def _described(value: Any, read: Any) -> str:
    try:
        return writable(read(value))
    except BaseException as error:  # whatever a user's __str__ or __repr__ raises
        return f"<{type_name(value)}, whose {read.__name__}() raised {type_name(error)}>"


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """From the user's first frame on, without ours; all frames of libraries that it called stay."""
    found = _without_ours(traceback.extract_tb(error.__traceback__))
    while found and found[0].filename.startswith(_MACHINERY):
        del found[0]
    return found


def _without_ours(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    return [frame for frame in stack if not frame.filename.startswith(_OURS)]


def _drop_ours(found: traceback.TracebackException) -> None:
    todo, seen = [found], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.stack = traceback.StackSummary.from_list(_without_ours(one.stack))
        todo += [inner for inner in (one.__cause__, one.__context__, *(one.exceptions or ())) if inner]


def _cut(text: str) -> str:
    return shorten(text, _KEPT_CHARS)
