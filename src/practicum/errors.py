"""Errors for users. Each message has the problem, its location, the expected value and a fix."""

from __future__ import annotations

import copyreg
import errno
import os
from typing import Any


class PracticumError(Exception):
    """An error with a message for the user, which the command line shows without a traceback."""

    details: str = ""
    """The full traceback of a user's code, for log.txt."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython and notebooks show in place of a traceback."""
        return [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", [])]

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are pickled between processes, and restored without __init__, whose arguments may differ.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # pyright: ignore


class RecipeError(PracticumError):
    """A mistake in a recipe: its key, the found value, the expected value and a suggestion."""

    def __init__(self, path: str, found: str, expected: str, suggestion: str = "") -> None:
        self.path, self.found, self.expected, self.suggestion = path, found, expected, suggestion
        lines = [f"{path}: found {found}, expected {expected}."]
        if suggestion:
            lines.append(f"  → {suggestion}")
        super().__init__("\n".join(lines))


class RecipeErrors(PracticumError):
    """All mistakes of a recipe."""

    def __init__(self, source: str, errors: list[RecipeError]) -> None:
        self.source, self.errors = source, errors
        count = "1 problem" if len(errors) == 1 else f"{len(errors)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"• {e}" for e in errors)]))


class DataError(PracticumError):
    """A bad row or file of a task. The message names file, line and reason."""


class StoreError(PracticumError):
    """A request for keys or fields that the data plane does not hold, or inconsistent data."""


class DeadlineError(PracticumError):
    """A wait passed its deadline. The message says who waited, for what and how long."""


class EngineError(PracticumError):
    """A rollout or teacher engine can't serve a request."""


class SessionError(EngineError):
    """An agent loop made an invalid request to its session, or returned an invalid value."""


class TeacherError(PracticumError):
    """A teacher failed, died or exceeded its deadline. The message names the teacher and the row."""


class RewardError(PracticumError):
    """A reward function raised or timed out. The message names the function and the sample."""


class ClusterError(PracticumError):
    """The cluster can't be reached, is too small for the recipe, or did not allocate resources in time."""


class ServeError(PracticumError):
    """A server failed to start or ended. The message has the reason, a fix and its last output."""


class CheckError(PracticumError):
    """A violated invariant of training. The message names the check and the numbers."""


class MissingExtraError(PracticumError):
    """An optional extra is not installed. The message has the install command."""

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
    errno.EIO: "check the disk",
}


def machine_trouble(error: BaseException) -> str | None:
    """Return a message if a full or read-only disk or too many open files caused an error, else None."""
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
