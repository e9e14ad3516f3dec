"""Runs a command and sees to it that nothing of it stays when whoever started this process is gone.

    python -I guard.py GRACE_S COMMAND...

The command has a process group of its own, so that Ctrl-C in a terminal does not reach it. It is asked to end
(SIGTERM) when standard input ends, which also happens when the process at its other side is killed, and is
killed after GRACE_S. What is left of its group is killed with it. This file needs only the standard library:
it must start at once and hold no memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def main(grace_s: float, command: list[str]) -> int:
    """Run the command; its exit code, 128 + the signal if one ended it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_end_with_guard)
    gone = threading.Event()

    def end() -> None:
        _send(os.kill, child.pid, signal.SIGTERM)
        if not gone.wait(grace_s):
            _send(os.killpg, child.pid, signal.SIGKILL)

    def end_at_eof() -> None:
        # Not sys.stdin: a thread that waits in it lets the interpreter abort at its end.
        while os.read(0, 1024):
            pass
        end()

    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=end, daemon=True).start())
    threading.Thread(target=end_at_eof, daemon=True).start()
    # Not reaped yet: its id, which is its group's, can't be another's while the group is killed.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    gone.set()
    _send(os.killpg, child.pid, signal.SIGKILL)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _send(how: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        how(pid, number)


def _end_with_guard() -> None:
    """On Linux, a guard that is killed takes the command with it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
