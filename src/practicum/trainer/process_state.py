"""What a process has one of, and users' code may change: set back after each stage of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from practicum.user_code import undo_dtype

_STREAMS = {"stdout": 1, "stderr": 2}


class ProcessState:
    """The working folder and the standard streams as they were when this was made, and torch's dtype.

    What has changed is told the first time.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._home, self._report = os.getcwd(), report
        self._streams = {name: getattr(sys, name) for name in _STREAMS}
        self._told: set[str] = set()

    def restore(self) -> None:
        """Be there again, with the same streams; one that is closed is replaced by nothing."""
        if (changed := undo_dtype()) is not None:
            self._tell(f"has {changed}: it is set back to float32 after each stage")
        for name, number in _STREAMS.items():
            self._restore_stream(name, number)
        try:
            here = os.getcwd()
        except FileNotFoundError:
            here = "a folder that is gone"
        if here != self._home:
            os.chdir(self._home)
            self._tell(
                f"has changed the working folder to {here}: it is set back after each stage, so that the "
                "recipe's paths stay what they are"
            )

    def _restore_stream(self, name: str, number: int) -> None:
        stream, found = self._streams[name], getattr(sys, name)
        if stream is not None and stream.closed:
            nothing = open(os.devnull, "w")  # noqa: SIM115
            try:
                os.fstat(number)
            except OSError:  # or the next file that is opened would get what child processes print
                os.dup2(nothing.fileno(), number)
            self._streams[name] = nothing
            setattr(sys, name, nothing)
            self._tell(f"has closed {name}: what would be shown there is in log.txt alone")
        elif found is not stream:
            setattr(sys, name, stream)
            self._tell(f"has replaced sys.{name}: it is set back after each stage")

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._report(f"a reward, loop or tool {what}")
