"""Errors that a user may see. Each says what was wrong, where, what was expected and what to do."""

from __future__ import annotations

import errno
import os
from typing import Any


class PracticumError(Exception):
    """An error with a sentence for the user; the command line shows it without a traceback."""

    details: str = ""
    """The whole traceback of a user's code, for log.txt."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and notebooks show in place of a traceback."""
        return [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", [])]

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross processes. They are made again without __init__, whose arguments may differ.
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[PracticumError], args: tuple[Any, ...]) -> PracticumError:
    return kind.__new__(kind, *args)


class RecipeError(PracticumError):
    """A mistake in a recipe: where it is, what was found, what was expected, what to do."""

    def __init__(self, path: str, found: str, expected: str, suggestion: str = "") -> None:
        self.path, self.found, self.expected, self.suggestion = path, found, expected, suggestion
        lines = [f"{path}: found {found}, expected {expected}."]
        if suggestion:
            lines.append(f"  → {suggestion}")
        super().__init__("\n".join(lines))


class RecipeErrors(PracticumError):
    """Several mistakes of one recipe, shown together."""

    def __init__(self, source: str, errors: list[RecipeError]) -> None:
        self.source, self.errors = source, errors
        count = "1 problem" if len(errors) == 1 else f"{len(errors)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"• {e}" for e in errors)]))


class DataError(PracticumError):
    """A bad row or file of a task: names the file, the line and the reason."""


class StoreError(PracticumError):
    """The data plane was asked for something it does not hold, or given something uneven."""


class DeadlineError(PracticumError):
    """A wait passed its deadline: says who waited, for what, for how long."""


class EngineError(PracticumError):
    """A rollout or teacher engine can't do what it was asked."""


class SessionError(EngineError):
    """An agent loop asked its session for what can't be, or returned what a loop can't return."""


class TeacherError(PracticumError):
    """A teacher can't score, died or did not answer in time: names the teacher and the row."""


class RewardError(PracticumError):
    """A reward function raised or timed out: names the function and the sample."""


class ClusterError(PracticumError):
    """The cluster can't be reached, is too small for the recipe, or did not give what it has in time."""


class ServeError(PracticumError):
    """A server can't be started or has ended: says why, what to do, and what it said last."""


class CheckError(PracticumError):
    """An invariant of training did not hold: names the check and the numbers."""


class MissingExtraError(PracticumError):
    """A part of an optional extra is needed and not installed: names the install command."""

    def __init__(self, what: str, extra: str, install: str | None = None) -> None:
        install = install or f"pip install 'practicum[{extra}]'"
        super().__init__(f"{what} needs an extra: {install}")


_OF_THE_MACHINE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EROFS: "make the folder writable",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (fs.file-max)",
    errno.EIO: "look at the disk",
}


def machine_trouble(error: BaseException) -> str | None:
    """Return a sentence if an error comes of a full or read-only disk or too many open files; else None.

    Libraries wrap such errors, or only quote what the system said.
    """
    waiting: list[BaseException | None] = [error]
    seen = set[int]()
    while waiting:
        cause = waiting.pop(0)
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        for number, advice in _OF_THE_MACHINE.items():
            text = str(cause)
            is_quoted = f"os error {number}" in text or os.strerror(number) in text
            if cause.errno == number if isinstance(cause, OSError) else is_quoted:
                name = getattr(cause, "filename", None)
                where = f"{name}: " if name else ""
                return f"{where}{os.strerror(number)}\n  → {advice}; then --resume continues a run"
        failures = getattr(cause, "failures", None)  # torch's CheckpointException: by rank, with a traceback
        parts = [pair[0] for pair in failures.values()] if isinstance(failures, dict) else []
        waiting += [*parts, cause.__cause__, cause.__context__]
    return None
