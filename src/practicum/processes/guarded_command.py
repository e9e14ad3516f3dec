"""A command that leaves nothing behind, whatever ends the process that started it.

    python -I guarded_command.py GRACE_S GROUP_S COMMAND...

runs a command as its guard. The command has its own process group, so that Ctrl-C in a terminal does not
reach it. It gets SIGTERM when standard input ends, which also happens when the process at its other end is
killed, and SIGKILL after GRACE_S. Then what is left of its group gets SIGTERM, so that it can clean up
(shared memory), and SIGKILL after GROUP_S. This file needs only the standard library: a guard must start at
once and hold little memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LINES = 400
"""Last lines of the log that are kept."""
_GRACE_S, _GROUP_S = 10.0, 5.0
"""Seconds that the command, and then what is left of its group, may take to end after SIGTERM."""


class GuardedCommand:
    """A command that runs under a guard, another process, while this context lasts.

    Whatever ends this process, the guard ends the command and what it has started.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._lines: deque[str] = deque(maxlen=LINES)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__)), f"{_GRACE_S:g}", f"{_GROUP_S:g}", *command],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="log of a server", daemon=True)
        self._reader.start()

    def __enter__(self) -> GuardedCommand:
        return self

    def __exit__(self, *_: object) -> None:
        """End the command: SIGTERM, then SIGKILL. A second Ctrl-C kills at once."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(_GRACE_S + _GROUP_S + 2)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            # The guard's death is the command's (Linux); elsewhere it ends by the closed input.
            with contextlib.suppress(ProcessLookupError):
                self._guard.send_signal(signal.SIGKILL)
            self._guard.wait(5)
        self._reader.join(5)

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code of the command, None if it still runs after the timeout."""
        try:
            code = self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5)  # for its last lines
        return code

    def log(self) -> str:
        """The last lines of what the command has written."""
        return "\n".join(self._lines)

    def _read(self) -> None:
        assert self._guard.stdout is not None
        for raw in self._guard.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            if self._verbose:
                print(line, file=sys.stderr, flush=True)


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(grace_s: float, group_s: float, command: list[str]) -> int:
    """Run the command; its exit code, 128 + the signal if one ended it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_prepare)
    gone = threading.Event()

    def end() -> None:
        _send(os.kill, child.pid, signal.SIGTERM)
        if not gone.wait(grace_s):
            _send(os.kill, child.pid, signal.SIGKILL)

    def end_at_eof() -> None:
        # Not sys.stdin: a thread that waits in it lets the interpreter abort at its end.
        while os.read(0, 1024):
            pass
        end()

    signal.signal(signal.SIGTERM, lambda *_: _run(end))
    _run(end_at_eof)
    # Not reaped yet: its id, which is its group's, can't be another's while signals are sent to it.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    gone.set()
    _send(os.killpg, child.pid, signal.SIGTERM)
    killer = threading.Timer(group_s, _send, (os.killpg, child.pid, signal.SIGKILL))
    killer.daemon = True
    killer.start()
    code = child.wait()
    _await_group(child.pid)
    return code if code >= 0 else 128 - code


def _await_group(group: int) -> None:
    """Until the group's other processes are gone, which are this process's children now (Linux)."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)
    _send(os.killpg, group, signal.SIGKILL)  # elsewhere nobody tells of their end


def _run(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


def _send(how: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(pid, number)


def _prepare() -> None:
    """In the command's process: usual signals, and on Linux an end with its guard, if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
