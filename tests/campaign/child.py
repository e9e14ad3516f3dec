"""The run that is disturbed: `practicum train`, which also tells through a pipe where it is."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from practicum.processes.host import running_hosts
from tests.campaign.processes import RESERVED

_PR_SET_PDEATHSIG = 1


def run(arguments: Sequence[str], events: int) -> NoReturn:
    """Train with these arguments of `practicum train`; events go to the file handle as JSON lines."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the campaign's end is this run's
    _tell(events)
    from practicum.cli import app

    sys.argv = ["practicum", "train", *arguments]
    app(["train", *arguments], prog_name="practicum")
    sys.exit(0)


def _tell(events: int) -> None:
    """Write where the run is whenever a stage, a checkpoint or a step begins."""
    from practicum.observe.progress import ProgressView
    from practicum.trainer.saver import Saver
    from practicum.trainer.step import StepRunner

    step, stage, save = StepRunner.step, ProgressView.stage, Saver.save
    at = [0]

    def tell(name: str) -> None:
        children = running_hosts()
        os.write(events, (json.dumps({"step": at[0], "stage": name, "children": children}) + "\n").encode())

    def stepping(self: StepRunner, number: int) -> dict[str, float]:
        at[0] = number
        return step(self, number)

    def staging(self: ProgressView, name: str) -> None:
        tell(name)
        stage(self, name)

    def saving(self: Saver, **options: Any) -> None:
        tell("checkpoint")
        save(self, **options)

    StepRunner.step, ProgressView.stage, Saver.save = stepping, staging, saving


class Run:
    """A start of a run: its process, its events, what it printed.

    It is forked from this process, which has imported all that takes seconds; `python` is another
    interpreter to start it with.
    """

    def __init__(self, arguments: Sequence[str], log: Path, python: Path | None = None) -> None:
        self.log = log
        self.pid, self._events = _start(arguments, log, python)
        RESERVED.add(self.pid)
        self.code: int | None = None
        self.timeline: list[tuple[float, int, str]] = []
        self.children: dict[str, int] = {}
        self._half = b""

    @property
    def step(self) -> int:
        return self.timeline[-1][1] if self.timeline else 0

    @property
    def stage(self) -> str:
        return self.timeline[-1][2] if self.timeline else "start"

    def listen(self, seconds: float) -> None:
        """Take in events until there is one, the run ends, or the time is over."""
        if self._events >= 0 and select.select([self._events], [], [], seconds)[0]:
            data = os.read(self._events, 1 << 16)
            if not data:
                os.close(self._events)
                self._events = -1
            *lines, self._half = (self._half + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                self.timeline.append((time.monotonic(), event["step"], event["stage"]))
                self.children = event["children"]
        elif self._events < 0:
            time.sleep(min(0.1, seconds))
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                RESERVED.discard(self.pid)

    def printed(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def _start(arguments: Sequence[str], log: Path, python: Path | None = None) -> tuple[int, int]:
    """Start a run in its own session; gives its process id and the read end of its events."""
    reads, writes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writes)
        return pid, reads
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(reads)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if python is not None:
            os.set_inheritable(writes, True)
            os.execv(python, [str(python), "-m", "tests.campaign.child", str(writes), *arguments])
        code = 0
        try:
            run(arguments, writes)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    run(sys.argv[2:], int(sys.argv[1]))
