"""Runs a command and sees to it that nothing of it stays when whoever started this process is gone.

    python -I guard.py GRACE_S REST_S COMMAND...

The command has a process group of its own, so that Ctrl-C in a terminal does not reach it. It is asked to end
(SIGTERM) when standard input ends, which also happens when the process at its other side is killed, and is
killed after GRACE_S. Then what is left of its group is asked, so that it can tidy up (shared memory), and
killed after REST_S. This file needs only the standard library: it must start at once and hold no memory.
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

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(grace_s: float, rest_s: float, command: list[str]) -> int:
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
    rest = threading.Timer(rest_s, _send, (os.killpg, child.pid, signal.SIGKILL))
    rest.daemon = True
    rest.start()
    code = child.wait()
    _await_rest(child.pid)
    return code if code >= 0 else 128 - code


def _await_rest(group: int) -> None:
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
