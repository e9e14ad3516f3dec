"""A guarded command: its log and exit code, and the process table after every kind of end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from practicum.processes.guarded_command import GuardedCommand

# A server like vLLM's: a process of its own beside it, and both stubborn if asked to be.
FAMILY = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), other.pid, flush=True)
time.sleep(600)
"""
# The process that starts it, as `practicum serve` does.
STARTER = """
import sys
from practicum.processes import guarded_command as child
child._GRACE_S = child._GROUP_S = 0.5
with child.GuardedCommand([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], {}, verbose=True) as started:
    started.wait()
"""


def gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def await_gone(*pids: int) -> None:
    until = time.monotonic() + 30
    while not all(map(gone, pids)):
        assert time.monotonic() < until, [pid for pid in pids if not gone(pid)]
        time.sleep(0.02)


def start(*words: str) -> tuple[subprocess.Popen[str], list[int]]:
    """The starter, and the ids of the two processes that it started."""
    command = [sys.executable, "-c", STARTER, FAMILY, *words]
    starter = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert starter.stderr is not None
    name, *pids = starter.stderr.readline().split()
    assert name == "pids"
    return starter, [int(pid) for pid in pids]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [(), ("stubborn",)], ids=["willing", "stubborn"])
def test_nothing_stays_when_the_starter_ends(number: signal.Signals, words: tuple[str, ...]):
    starter, pids = start(*words)
    starter.send_signal(number)
    starter.communicate(timeout=30)
    await_gone(*pids)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is killed at once")
def test_what_the_command_leaves_behind_can_tidy_up(tmp_path: Path):
    tidy = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.3)\n    pathlib.Path(sys.argv[1]).touch()\n    sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\ntime.sleep(600)"
    )
    code = (
        "import subprocess, sys\n"
        "other = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], stdout=subprocess.PIPE)\n"
        "other.stdout.readline()"
    )
    with GuardedCommand([sys.executable, "-c", code, tidy, str(tmp_path / "tidied")], {}) as child:
        assert child.wait(30) == 0
    assert (tmp_path / "tidied").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_command_that_dies_takes_its_own_processes_with_it():
    starter, pids = start()
    os.kill(pids[0], signal.SIGKILL)
    starter.communicate(timeout=30)
    assert starter.returncode == 0, "its end was noticed"
    await_gone(*pids)


def test_the_exit_code_and_the_end_of_the_log_are_known():
    code = "import sys; [print('line', i) for i in range(1000)]; sys.exit(7)"
    with GuardedCommand([sys.executable, "-c", code], {}) as child:
        assert child.wait(30) == 7
        assert child.log().splitlines()[-1] == "line 999"


def test_waiting_has_a_deadline_and_the_end_of_the_context_ends_the_command():
    with GuardedCommand([sys.executable, "-c", "import time; time.sleep(600)"], {}) as child:
        assert child.wait(0.05) is None
    assert child.wait(0) == 128 + signal.SIGTERM
