"""The Python tool: runs a program in a process of its own and answers with what it printed.

By default the process is in bubblewrap: `bubblewrap` tells what the program can reach. With isolation
`process` it is a child like any other. `sandbox` runs in both, with limits on time, memory, output and files,
and a guard against accidents and a model's pranks, which a determined program gets round.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from practicum.devices import count_cores
from practicum.errors import EngineError
from practicum.processes.bounded_command import FinishedProcess, RunningProcess, run_process
from practicum.recipe.schema.rollout_sections import Isolation
from practicum.sessions.tools import bubblewrap
from practicum.sessions.tools.tool import Parameter, Tool, ToolError, cut

_SANDBOX = Path(__file__).with_name("sandbox.py")
_TRIAL_S = 60.0
_UNREAD = b"\n"
"""Stands before the program, so that the file's offset tells whether the sandbox has read it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. Seconds are wall time from the start of its process."""

    seconds: float = 5.0
    cpu_s: int = 6
    memory_mb: int = 256
    output_chars: int = 2000
    file_mb: int = 4
    changes: int = 64
    """Times that it may open a file for writing, or make, rename or remove one."""
    space_mb: int = 64
    """All its files together, in bubblewrap."""


def python_tool(
    timeout_s: float = 5.0,
    memory_mb: int = 256,
    output_chars: int = 2000,
    isolation: Isolation = "bubblewrap",
) -> Tool:
    """The tool that runs programs, as many at once as there are cores; see `isolation_problem`."""
    limits = Limits(timeout_s, math.ceil(timeout_s) + 1, memory_mb, output_chars)
    runner = PythonRunner(limits, isolation)

    async def run(arguments: dict[str, Any]) -> str:
        return await runner.run(arguments["code"])

    return Tool(
        name="python",
        about="Runs a Python program (standard library only) and gives what it prints.",
        parameters=(Parameter("code", about="The program; print what you want to see."),),
        run=run,
        close=runner.close,
    )


class PythonRunner:
    """Runs programs within limits, `at_once` of them at a time (default: the cores, at least 2)."""

    def __init__(
        self, limits: Limits, isolation: Isolation = "bubblewrap", at_once: int | None = None
    ) -> None:
        self.limits = limits
        self.isolation: Isolation = isolation
        self._at_once = at_once or max(2, count_cores())
        # A semaphore belongs to one event loop; a runner may serve several.
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._running = RunningProcess()

    async def run(self, program: str) -> str:
        """What the program prints; a ToolError with that and the reason if it fails or passes a limit."""
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._at_once))
        async with gate:
            finished = None if self._running.closed else await self._run(program)
            if finished is None or self._running.closed:
                raise EngineError("the Python tool was closed before a program had ended")
            return _answer(finished, self.limits)

    def close(self) -> None:
        """Kill the programs that still run; their calls and later ones raise EngineError."""
        self._running.close()

    async def _run(self, program: str) -> FinishedProcess:
        with tempfile.TemporaryFile() as source, _folder(self.isolation) as folder:
            source.write(_UNREAD + program.encode("utf-8", "replace"))
            source.seek(0)
            finished = await run_process(
                _command(self.limits, self.isolation),
                folder=folder,
                environment=_environment(bubblewrap.FOLDER if self.isolation == "bubblewrap" else folder),
                seconds=self.limits.seconds,
                stdout_bytes=4 * (self.limits.output_chars + 1),
                running=self._running,
                stdin=source.fileno(),
            )
            # The two processes share the offset.
            if os.lseek(source.fileno(), 0, os.SEEK_CUR) == 0 and not _was_killed(finished):
                raise EngineError(f"the Python tool did not start: {_last_line(finished.stderr)}")
            return finished


@cache
def isolation_problem(isolation: Isolation) -> str | None:
    """Why programs can't be isolated so on this machine; None if they can. Runs a program, once."""
    if isolation == "process":
        return None
    if bubblewrap.find_bubblewrap() is None:
        return "it is not installed (there is no command bwrap)"
    command = _command(Limits(), isolation)
    try:
        done = subprocess.run(
            command,
            input=_UNREAD + b"print(6 * 7)",
            capture_output=True,
            env=_environment(bubblewrap.FOLDER),
            timeout=_TRIAL_S,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.stdout == b"42\n" else _last_line(done.stderr) or f"exit code {done.returncode}"


@contextmanager
def _folder(isolation: Isolation) -> Iterator[Path]:
    """Where a program starts: in a fresh folder that is removed afterwards, if bubblewrap makes none."""
    if isolation == "bubblewrap":
        yield Path("/")
        return
    folder = Path(tempfile.mkdtemp(prefix="practicum-python-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _command(limits: Limits, isolation: Isolation) -> list[str]:
    """An interpreter without site-packages, user folder or script folder on its path."""
    inside = isolation == "bubblewrap"
    options = ["-S", "-s", "-P", "-B", "-X", "utf8"]
    held = [f"{name}={getattr(limits, name)}" for name in ("cpu_s", "memory_mb", "file_mb", "changes")]
    interpreter = bubblewrap.python() if inside else sys.executable
    command = [interpreter, *options, str(_SANDBOX), *held, f"isolated={inside:d}", str(os.getpid())]
    if not inside:
        return command
    return bubblewrap.isolated(command, files=[str(_SANDBOX)], space_mb=limits.space_mb)


def _environment(folder: str | Path) -> dict[str, str]:
    """Nothing of this process's but what an interpreter may need to find its libraries."""
    kept = {k: os.environ[k] for k in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if k in os.environ}
    # A fixed hash seed: the order of a printed set is the same in each run.
    return {**kept, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONHASHSEED": "0"}


def _was_killed(finished: FinishedProcess) -> bool:
    """Whether somebody ended the process, or one of bubblewrap's, which then says nothing."""
    return finished.code < 0 or finished.code > 128 or not finished.stderr.strip()


def _answer(finished: FinishedProcess, limits: Limits) -> str:
    printed = cut(finished.stdout.decode("utf-8", "replace").rstrip("\n"), limits.output_chars)
    reason = None if finished.cut else _reason(finished, limits)
    if reason is not None:
        raise ToolError(f"{printed}\n{reason}" if printed else reason)
    return printed or "(the program printed nothing)"


def _reason(finished: FinishedProcess, limits: Limits) -> str | None:
    """Why the program failed, in a sentence; None if it did not."""
    late = f"the program took longer than {limits.seconds:g} s and was stopped."
    if finished.late:
        return late
    line, code = _last_line(finished.stderr), finished.code
    if 128 < code < 128 + signal.NSIG:  # how bubblewrap tells a signal
        code = 128 - code
    match code:
        case 0:
            return None
        case 1 if line == "MemoryError":
            return f"the program needed more than {limits.memory_mb} MB of memory."
        case 1 if line:
            return line
        case _ if code == -signal.SIGXCPU:
            return late
        case _ if code < 0:
            return f"the program crashed ({signal.strsignal(-code)})."
        case _:
            return f"the program ended with exit code {code}."


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
