"""What a user's own code did, in words: its errors, values and frames, whatever they are made of. No torch.

An exception whose `__str__` raises, a value whose `__repr__` raises or text with lone surrogates is described
like any other; nothing here raises.
"""

from __future__ import annotations

import math
import sys
import traceback
from contextlib import suppress
from numbers import Real
from pathlib import Path
from types import CoroutineType
from typing import Any

FLOAT32_MAX = 3.4028234e38
_OURS = (str(Path(__file__).parent), "<frozen importlib", "<frozen runpy")
_MACHINERY = tuple(
    str(Path(traceback.__file__).parent / name) for name in ("asyncio", "importlib", "threading.py")
)
_SHOWN_FRAMES = 8
_SHOWN_CHARS = 300
"""Of a line of code or of a traceback on the screen."""
_KEPT_CHARS = 20_000
_TRACEBACK: Any = BaseException.__dict__["__traceback__"]


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
    message = shorten(" ".join(shorten(text_of(error), _KEPT_CHARS).splitlines()))
    return f"{type_name(error)}{': ' if message else ''}{message}"


def place(error: BaseException | None) -> str:
    """Where a user's error was raised, to follow its line: " (rewards.py, line 12)"; empty if not known."""
    own = [] if error is None else _own_frames(error)
    return writable(f" ({Path(own[-1].filename).name}, line {own[-1].lineno})") if own else ""


def frames(error: BaseException, indent: str = "  ") -> str:
    """The user's frames for the screen: file, line and source line of each; empty if there are none.

    Ours are left out, and those in the middle of a deep stack. A syntax error shows the line it is in.
    """
    blocks = _blocks(_own_frames(error))
    if issubclass(type(error), SyntaxError):
        with suppress(Exception):  # one that a user made may have anything in it
            blocks += traceback.format_exception_only(error)[:-1]
    return _indented(blocks, indent)


def running_frames(thread: int, indent: str = "  ") -> str:
    """The user's frames that a thread is in now, as in `frames`; empty if it runs none of the user's code."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else _indented(_blocks(_users(traceback.extract_stack(frame))), indent)


def trace(error: BaseException) -> str:
    """The whole traceback for log.txt, with the errors that caused it, without our frames."""
    try:
        summary = traceback.TracebackException.from_exception(error)
        _drop_ours(summary)
        return _cut(writable("".join(summary.format()).rstrip()))
    except BaseException:  # a hostile exception: its frames are what is left
        return _cut(f"{frames(error)}\n{error_line(error)}")


def finite_number(value: Any) -> float | None:
    """A value as a float; None if it is no finite number that float32 can hold, whatever it is instead."""
    try:
        if _is_masked(value):
            return None
        if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # a scalar of numpy or torch
            value = value.item()
        number = float(value) if isinstance(value, Real) else math.nan
    except BaseException:  # whatever the user's value does when it is read
        return None
    return number if math.isfinite(number) and abs(number) <= FLOAT32_MAX else None


def undo_dtype() -> str | None:
    """Set torch's default dtype back to float32 after users' code ran; in words, what it was set to.

    All models of a process compute with it, those of other threads too.
    """
    torch = sys.modules.get("torch")
    if torch is None or (found := torch.get_default_dtype()) is torch.float32:
        return None
    torch.set_default_dtype(torch.float32)
    return f"changed torch's default dtype to {found}, which all models of the process would compute with"


def unawaited(value: Any) -> str | None:
    """What is wrong with a result that is a coroutine, in words; the coroutine is closed."""
    if type(value) is not CoroutineType:
        return None
    value.close()
    return f"returned a coroutine, {writable(value.__qualname__)}, that it did not await"


def lone_surrogate(text: str) -> str | None:
    """The first half of a surrogate pair without the other half, and where; no tokenizer takes such texts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"half of a surrogate pair ({text[error.start]!r} at character {error.start + 1})"
    return None


def speakable(text: str) -> str:
    """The text with "?" for lone surrogates, which no tokenizer takes."""
    return str.encode(text, "utf-8", "replace").decode("utf-8")


def _is_masked(value: Any) -> bool:
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
    try:
        # Not as an attribute of the error, whose class may have another one of this name.
        return _users(traceback.extract_tb(_TRACEBACK.__get__(error)))
    except Exception:  # code of a file whose name nobody can ask the system for
        return []


def _users(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    frames_of_user = _without_ours(stack)
    while frames_of_user and frames_of_user[0].filename.startswith(_MACHINERY):
        del frames_of_user[0]
    return frames_of_user


def _blocks(stack: list[traceback.FrameSummary]) -> list[str]:
    """File, line and source of each frame, those in the middle of a deep stack left out."""
    shown = traceback.StackSummary.from_list(stack).format()
    if len(shown) > _SHOWN_FRAMES:
        left_out = len(shown) - _SHOWN_FRAMES
        shown[2 : 2 + left_out] = [f"  … {left_out} more"]
    return shown


def _indented(blocks: list[str], indent: str) -> str:
    lines = [line for block in blocks for line in writable(block).splitlines()]
    return "\n".join(f"{indent}{shorten(line, _SHOWN_CHARS)}" for line in lines)


def _without_ours(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    return [frame for frame in stack if not frame.filename.startswith(_OURS)]


def _drop_ours(summary: traceback.TracebackException) -> None:
    todo, seen = [summary], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.stack = traceback.StackSummary.from_list(_without_ours(one.stack))
        todo += [inner for inner in (one.__cause__, one.__context__, *(one.exceptions or ())) if inner]


def _cut(text: str) -> str:
    return shorten(text, _KEPT_CHARS)
