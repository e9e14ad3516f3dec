"""The process table, as tests look at it, and where bubblewrap can be tested."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from practicum.sessions.tools.python_tool import isolation_problem

PROBLEM = isolation_problem("bubblewrap")
# CI sets the variable: there, a bubblewrap that does not run must not go unnoticed.
needs_bubblewrap = pytest.mark.skipif(
    PROBLEM is not None and "PRACTICUM_REQUIRE_BUBBLEWRAP" not in os.environ,
    reason=f"bubblewrap does not run here: {PROBLEM}",
)
ISOLATIONS = ["process", pytest.param("bubblewrap", marks=needs_bubblewrap)]
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""


def group(leader: int) -> list[int]:
    """Processes of a process group, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        fields = _read(stat).rpartition(b")")[2].split()
        if fields and fields[0] != b"Z" and int(fields[2]) == leader:
            found.append(int(stat.parent.name))
    return found


def sandboxes(parent: int | None = None) -> list[int]:
    """Processes of the Python tool's programs for this process, or for another parent; bubblewrap's too."""
    wanted = str(parent or os.getpid()).encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = _read(path).rstrip(b"\0").split(b"\0")
        if words[-1] == wanted and any(word.endswith(b"sandbox.py") for word in words):
            found.append(int(path.parent.name))
    return found


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for what happens in other processes; fails at the deadline."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)
