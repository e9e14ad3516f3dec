"""The run that is disturbed: `practicum train`, which also tells through a pipe where it is."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from practicum.processes.host import running_hosts

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
    """A start of a run: its process, its events, what it printed."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log, self._half = log, b""
        self._events, writes = os.pipe()
        command = [sys.executable, "-m", "tests.campaign.child", str(writes), *arguments]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, pass_fds=[writes], start_new_session=True
            )
        os.close(writes)
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

    def printed(self) -> str:
        return self.log.read_text(errors="replace")


if __name__ == "__main__":
    run(sys.argv[2:], int(sys.argv[1]))
