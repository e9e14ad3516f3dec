"""The Python tool: runs a program in a process of its own and answers with what it printed.

This bounds accidents and a model's pranks: time, memory, output, files, processes, network. It is no security
boundary against a determined attacker; train models that you don't trust in a container or a virtual machine.
What holds the program is told in `sandbox`, which runs in its process.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from practicum.errors import EngineError
from practicum.processes.bounded_command import FinishedProcess, RunningProcess, run_process
from practicum.sessions.tools.tool import Parameter, Tool, ToolError, cut

_SANDBOX = Path(__file__).with_name("sandbox.py")
_PROGRAM = "program.py"


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


def python_tool(timeout_s: float = 5.0, memory_mb: int = 256, output_chars: int = 2000) -> Tool:
    """The tool that runs programs, as many at once as there are cores."""
    limits = Limits(timeout_s, math.ceil(timeout_s) + 1, memory_mb, output_chars)
    runner = PythonRunner(limits)

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

    def __init__(self, limits: Limits, at_once: int | None = None) -> None:
        self.limits = limits
        self._at_once = at_once or max(2, _cores())
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
        """Run in a fresh folder that is removed afterwards."""
        folder = Path(tempfile.mkdtemp(prefix="practicum-python-"))
        try:
            source = folder / _PROGRAM
            source.write_text(program, encoding="utf-8", errors="replace", newline="")
            finished = await run_process(
                _command(self.limits),
                folder=folder,
                environment=_environment(folder),
                seconds=self.limits.seconds,
                stdout_bytes=4 * (self.limits.output_chars + 1),
                running=self._running,
            )
            # The sandbox removes the program's file when it takes over.
            if source.exists() and finished.code != -signal.SIGKILL:
                raise EngineError(f"the Python tool did not start: {_last_line(finished)}")
            return finished
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _command(limits: Limits) -> list[str]:
    """An interpreter without site-packages, user folder or script folder on its path."""
    options = ["-S", "-s", "-P", "-B", "-X", "utf8"]
    held = [f"{name}={getattr(limits, name)}" for name in ("cpu_s", "memory_mb", "file_mb", "changes")]
    return [sys.executable, *options, str(_SANDBOX), _PROGRAM, *held, str(os.getpid())]


def _environment(folder: Path) -> dict[str, str]:
    """Nothing of this process's but what an interpreter may need to find its libraries."""
    kept = {k: os.environ[k] for k in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if k in os.environ}
    # A fixed hash seed: the order of a printed set is the same in each run.
    return {**kept, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONHASHSEED": "0"}


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
    line = _last_line(finished)
    match finished.code:
        case 0:
            return None
        case 1 if line == "MemoryError":
            return f"the program needed more than {limits.memory_mb} MB of memory."
        case 1 if line:
            return line
        case code if code == -signal.SIGXCPU:
            return late
        case code if code < 0:
            return f"the program crashed ({signal.strsignal(-code)})."
        case code:
            return f"the program ended with exit code {code}."


def _last_line(finished: FinishedProcess) -> str:
    lines = finished.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
