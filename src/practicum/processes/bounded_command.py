"""A command in its own process: bounded in time and output; its whole process group is killed at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import IO

from practicum.errors import EngineError

_PIECE = 1 << 16
_STDERR_BYTES = 4096
_GRACE_S = 5.0
"""How long a killed group may take to be gone; only one that the kernel holds takes longer."""


@dataclass(frozen=True, slots=True)
class FinishedProcess:
    """How a process ended: what it wrote first on stdout and last on stderr, and its return code.

    `cut`: it wrote more than it may and was killed. `late`: it was killed at its time limit.
    """

    stdout: bytes
    stderr: bytes
    code: int
    cut: bool
    late: bool


class RunningProcess:
    """The processes that one owner has running; closing kills them, and those that start later, at once."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.closed = False
        self._lock = threading.Lock()

    def add(self, pid: int) -> None:
        """Note a process that has just started."""
        with self._lock:
            self.pids.add(pid)
            if self.closed:
                kill_group(pid)

    def remove(self, pid: int) -> None:
        """Forget a process that was killed or is gone: its id may become another's."""
        with self._lock:
            self.pids.discard(pid)

    def close(self) -> None:
        """Kill; from any thread."""
        with self._lock:
            self.closed = True
            for pid in self.pids:
                kill_group(pid)


async def run_process(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    seconds: float,
    stdout_bytes: int,
    running: RunningProcess,
    stdin: int = DEVNULL,
) -> FinishedProcess:
    """Run a command in its own session for at most these seconds from its start; `stdin` is an open file.

    Its process group is killed at the end, whatever the end is: its own, the limits' or a cancellation.
    `running` knows it meanwhile, for whoever must end it from outside of the event loop.
    """
    try:
        # Not asyncio's: cancelled while it starts one, it kills that process alone, not what it has started.
        process = Popen(
            command,
            stdin=stdin,
            stdout=PIPE,
            stderr=PIPE,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise EngineError(f"can't start {command[0]} for a tool: {error}") from error
    running.add(process.pid)
    follower = asyncio.ensure_future(_follow(process, stdout_bytes))
    try:
        done, _ = await asyncio.wait({follower}, timeout=seconds)
    finally:
        kill_group(process.pid)
        running.remove(process.pid)
        gone, _ = await asyncio.wait({follower}, timeout=_GRACE_S)
    if not gone:
        follower.cancel()
        raise EngineError(f"a tool's process {process.pid} was killed and did not end within {_GRACE_S:g} s")
    stdout, stderr, cut, code = follower.result()
    # A process that ended by itself while the event loop was busy with others was not late.
    return FinishedProcess(stdout, stderr, code, cut, late=not done and not cut and code == -signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill the process and what it started; nothing happens if all are gone."""
    with suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
        os.killpg(pid, signal.SIGKILL)


async def _follow(process: Popen[bytes], stdout_bytes: int) -> tuple[bytes, bytes, bool, int]:
    """Read both outputs to their ends, keeping little of them, and reap the process."""
    reading = _read_head(process, stdout_bytes), _read_tail(process)
    (stdout, cut), stderr, code = await asyncio.gather(*reading, asyncio.to_thread(_reap, process))
    return stdout, stderr, cut, code


def _reap(process: Popen[bytes]) -> int:
    """The return code of the process; what it leaves behind is killed, as it would keep the outputs open."""
    code = process.wait()
    kill_group(process.pid)
    return code


async def _read_head(process: Popen[bytes], limit: int) -> tuple[bytes, bool]:
    output, kept = await _open(process.stdout), bytearray()
    while piece := await output.read(_PIECE):
        if len(kept) > limit:
            continue
        kept += piece
        if len(kept) > limit:
            kill_group(process.pid)
    return bytes(kept[:limit]), len(kept) > limit


async def _read_tail(process: Popen[bytes]) -> bytes:
    output, kept = await _open(process.stderr), b""
    while piece := await output.read(_PIECE):
        kept = (kept + piece)[-_STDERR_BYTES:]
    return kept


async def _open(pipe: IO[bytes] | None) -> asyncio.StreamReader:
    assert pipe is not None
    output = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), pipe)
    return output
