"""The run that is disturbed: `practicum train`, which also tells through a pipe where it is.

It may be asked to wait after each event for an answer, so that what disturbs it comes at exactly that point.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from practicum.processes.host import running_hosts

_PR_SET_PDEATHSIG = 1


def run(arguments: Sequence[str], events: int, answers: int) -> NoReturn:
    """Train with these arguments of `practicum train`; events go to the file handle as JSON lines. A byte of
    `answers`, a file handle if it is not negative, is awaited after each event."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the campaign's end is this run's
    _tell(events, answers)
    from practicum.cli import app

    sys.argv = ["practicum", "train", *arguments]
    app(["train", *arguments], prog_name="practicum")
    sys.exit(0)


def _tell(events: int, answers: int) -> None:
    """Write where the run is whenever a stage, a checkpoint or a step begins."""
    from practicum.observe.progress import ProgressView
    from practicum.trainer.saver import Saver
    from practicum.trainer.step import StepRunner

    step, stage, save = StepRunner.step, ProgressView.stage, Saver.save
    at = [0]

    def tell(name: str) -> None:
        children = running_hosts()
        os.write(events, (json.dumps({"step": at[0], "stage": name, "children": children}) + "\n").encode())
        if answers >= 0:
            os.read(answers, 1)

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
    """A start of a run: its process, its events, what it printed."""

    def __init__(self, arguments: Sequence[str], log: Path, start: Callable[..., Any] | None = None) -> None:
        """With `start`, in place of `subprocess.Popen`, the run waits for `answer` after each event."""
        self.log, self._half = log, b""
        self._events, writes = os.pipe()
        reads, self._answers = os.pipe() if start is not None else (-1, -1)
        handles = [handle for handle in (writes, reads) if handle >= 0]
        command = [sys.executable, "-m", "tests.campaign.child", str(writes), str(reads), *arguments]
        with log.open("ab") as output:
            self._process = (start or subprocess.Popen)(
                command, stdout=output, stderr=output, pass_fds=handles, start_new_session=True
            )
        for handle in handles:
            os.close(handle)
        self.pid, self.code = self._process.pid, None
        self.timeline: list[tuple[float, int, str]] = []
        self.children: dict[str, int] = {}

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
        self.code = self._process.poll()

    def answer(self) -> None:
        """Have the run go on after an event."""
        with suppress(BrokenPipeError):  # it has ended
            os.write(self._answers, b"!")

    def kill(self) -> None:
        """End the run, and forget it."""
        self._process.kill()
        self._process.wait(10)
        for handle in (self._events, self._answers):
            if handle >= 0:
                os.close(handle)

    def printed(self) -> str:
        return self.log.read_text(errors="replace")


if __name__ == "__main__":
    run(sys.argv[3:], int(sys.argv[1]), int(sys.argv[2]))
