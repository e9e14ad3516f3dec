"""The Python tool: run a program in bubblewrap within limits, and return its output.

The program sees no other processes, no network, no /proc, four devices, and only Python's files, read-only.
It can write only to /tmp, which is small, in memory and removed at the end. `prlimit` sets the kernel's
limits inside.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryFile
from typing import Any
from weakref import WeakKeyDictionary

from practicum.devices import count_cores
from practicum.errors import EngineError
from practicum.sessions.tools.tool import OUTPUT_CHARS, Parameter, Tool, ToolError, cut

INSTALL = "apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora)"
_FOLDER = "/tmp"
"""The only folder that a program can write to."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store")
_SYSTEM = (*_LIBRARIES, "/etc/ld.so.cache", "/usr/share/zoneinfo")
_TRIAL_S = 60.0
_GRACE_S = 5.0
"""Seconds for a killed program to end."""
_FILE_MB = 4
"""Maximum size of a program's files, including its output."""
_ERROR_CHARS = 400


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program. `seconds` is wall time, `space_mb` the total size of its files."""

    seconds: float = 5.0
    cpu_s: int = 6
    memory_mb: int = 256
    output_chars: int = OUTPUT_CHARS
    space_mb: int = 64


def python_tool(timeout_s: float = 5.0) -> Tool:
    """Return the tool, which runs as many programs concurrently as the machine has cores."""
    runner = PythonRunner(Limits(timeout_s, math.ceil(timeout_s) + 1))

    async def run(arguments: dict[str, Any]) -> str:
        return await runner.run(arguments["code"])

    return Tool(
        name="python",
        about="Runs a Python program (standard library only) and returns its output.",
        parameters=(Parameter("code", about="The program; print what you want to see."),),
        run=run,
        close=runner.close,
    )


class PythonRunner:
    """Runs at most `max_programs` programs concurrently (default: the cores, at least 2)."""

    def __init__(self, limits: Limits, max_programs: int | None = None) -> None:
        self.limits = limits
        self._max_programs = max_programs or max(2, count_cores())
        # A semaphore belongs to one event loop, but a runner may serve several.
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    async def run(self, program: str) -> str:
        """Return the program's output, or raise a ToolError with output and reason."""
        gate = self._gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._max_programs))
        async with gate:
            with TemporaryFile() as source, TemporaryFile() as stdout, TemporaryFile() as stderr:
                source.write(program.encode("utf-8", "replace") + b"\n")
                source.seek(0)
                code, is_late = await self._run(source.fileno(), stdout.fileno(), stderr.fileno())
                # The processes share the file offset, which shows if the interpreter has read the program.
                was_read = os.lseek(source.fileno(), 0, os.SEEK_CUR) > 0
                stdout.seek(0)
                stderr.seek(0)
                printed = (
                    stdout.read(4 * self.limits.output_chars + 4).decode("utf-8", "replace").rstrip("\n")
                )
                error = _error_line(stderr.read())
        if not was_read and 0 < code < 128 and error:
            raise EngineError(f"the Python tool did not start: {error}")
        answer, reason = cut(printed, self.limits.output_chars), self._failure(code, is_late, error)
        if reason is not None and answer == printed:
            raise ToolError(f"{printed}\n{reason}" if printed else reason)
        return answer or "(the program printed nothing)"

    def close(self) -> None:
        """Kill the running programs, from any thread. Their calls and later ones raise EngineError."""
        self._closed = True
        for process in tuple(self._running):
            _kill(process)

    async def _run(self, source: int, stdout: int, stderr: int) -> tuple[int, bool]:
        """Return a program's exit code, and True if it was killed at its limit. Its processes end with it."""
        command, environment = _command(self.limits), _environment()
        try:
            # Not asyncio's: cancelling the start of one of its processes leaves open pipes behind.
            process = subprocess.Popen(
                command,
                stdin=source,
                stdout=stdout,
                stderr=stderr,
                cwd="/",
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"the Python tool did not start: {error}") from error
        self._running.add(process)
        ended = asyncio.ensure_future(asyncio.to_thread(process.wait))
        try:
            done, _ = await asyncio.wait({ended}, timeout=0 if self._closed else self.limits.seconds)
        finally:
            _kill(process)
            self._running.discard(process)
            await asyncio.wait({ended}, timeout=_GRACE_S)
        if self._closed:
            raise EngineError("the Python tool was closed before a program had ended")
        if not ended.done():
            raise EngineError(f"process {process.pid} of the Python tool was killed but did not end")
        # A program that ended while the event loop was busy is not late.
        return ended.result(), not done and ended.result() == -signal.SIGKILL

    def _failure(self, code: int, is_late: bool, error: str) -> str | None:
        """Return why the program failed, as a message for the model, or None."""
        if 128 < code < 128 + signal.NSIG:  # how bubblewrap reports a signal
            code = 128 - code
        if is_late or code == -signal.SIGXCPU:
            return f"the program took longer than {self.limits.seconds:g} s and was stopped."
        if code == 0:
            return None
        if code < 0:
            return f"the program crashed ({signal.strsignal(-code)})."
        if code == 1 and error.startswith("MemoryError"):
            return f"the program needed more than {self.limits.memory_mb} MB of memory."
        return (code == 1 and error) or f"the program ended with exit code {code}."


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill bubblewrap and every process inside, which form a group, as its child may outlive it."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _error_line(stderr: bytes) -> str:
    """Return the last error of a traceback as one line, with the program's line number."""
    text = stderr.decode("utf-8", "replace").strip("\n")
    lines = text.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith(" ")]
    error = " ".join(" ".join(lines[frames[-1] + 1 if frames else -1 :]).split())[:_ERROR_CHARS]
    numbers = re.findall(r'^  File "<stdin>", line (\d+)', text, re.MULTILINE)
    return f"{error} (line {numbers[-1]})" if numbers else error


@cache
def sandbox_problem() -> str | None:
    """Return why bubblewrap can't run programs on this machine, or None. Tests it once."""
    for command in ("bwrap", "prlimit"):
        if shutil.which(command) is None:
            return f"the command {command} is not installed"
    program = {"input": b"print(6 * 7)", "env": _environment(), "timeout": _TRIAL_S}
    try:
        done = subprocess.run(_command(Limits()), capture_output=True, **program)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.stdout == b"42\n" else _error_line(done.stderr) or f"exit code {done.returncode}"


def _command(limits: Limits) -> list[str]:
    """Return the command that runs the program on its standard input in bubblewrap."""
    # The interpreter of a virtual environment is a link to the real one.
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    prlimit = os.path.realpath(shutil.which("prlimit") or "prlimit")
    options = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    options += ["--size", str(limits.space_mb << 20), "--tmpfs", _FOLDER]
    for device in _DEVICES:
        options += ["--dev-bind", device, device]
    for path in (*_python_files(python), prlimit):
        options += ["--ro-bind-try", path, path]
    options += ["--chdir", _FOLDER, "--remount-ro", "/"]
    limited = [prlimit, "--core=0", "--nofile=64", "--nproc=1", f"--as={limits.memory_mb << 20}"]
    limited += [f"--fsize={_FILE_MB << 20}", f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}"]
    interpreter = [python, "-S", "-s", "-P", "-B", "-X", "utf8", "-"]
    return [shutil.which("bwrap") or "bwrap", *options, "--", *limited, "--", *interpreter]


@cache
def _python_files(python: str) -> tuple[str, ...]:
    """Return the interpreter, its library, and the system's libraries."""
    prefix = os.path.dirname(os.path.dirname(python))
    paths = [*_SYSTEM, python, os.path.join(prefix, "lib"), os.path.join(prefix, "lib64")]
    paths += [os.path.dirname(os.__file__), sysconfig.get_config_var("DESTSHARED") or ""]
    paths += os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return tuple(dict.fromkeys(path for path in paths if os.path.isabs(path)))


def _environment() -> dict[str, str]:
    """Return the interpreter's environment. The hash seed fixes the order of printed sets."""
    libraries = {k: os.environ[k] for k in ("LD_LIBRARY_PATH",) if k in os.environ}
    return {**libraries, "HOME": _FOLDER, "TMPDIR": _FOLDER, "PYTHONHASHSEED": "0"}
