"""Ctrl-C and SIGTERM: the first one asks the run to finish its step, a second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Stopped(KeyboardInterrupt):
    """A second signal; `number` is its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"a second {signal.Signals(number).name}")


class Interrupt:
    """Within this context SIGINT and SIGTERM set `asked` and `number`; a second signal raises Stopped."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self.number: int | None = None
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._handle)
                self._before[number] = signal.SIG_DFL if before is None else before  # None: not Python's
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise Stopped(number)
        self.asked, self.number = True, number
        self._say("stopping after this step, with a checkpoint; Ctrl-C again stops at once")
