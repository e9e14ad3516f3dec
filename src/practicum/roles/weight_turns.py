"""Turns on an engine that samples with several weights, one after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from practicum.errors import DeadlineError


class WeightTurns:
    """Who samples by which weights on one engine: it keeps them until all who need them are done.

    Whoever needs others waits in line. Weights are named by the step that they are after. `deadline_s` is the
    time in which one of those who sample must be done.
    """

    def __init__(self, deadline_s: float, held: int | None = None) -> None:
        self._deadline_s, self.held = deadline_s, held
        self._users = 0
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    def forget(self) -> None:
        """What the engine has is of no step any more; nobody samples."""
        self.held = None

    @contextmanager
    def use(self, step: int, load: Callable[[], None]) -> Iterator[None]:
        """The engine has the weights after this step inside; `load` gives them to it, unless it has them."""
        with self._changed:
            self._wait(step)
            if self.held != step:
                self.held = None  # if they can't be loaded, it has none that are known
                load()
                self.held = step
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def _wait(self, step: int) -> None:
        me = object()
        self._line.append(me)
        try:
            while self._line[0] is not me or (self._users and self.held != step):
                if not self._changed.wait(self._deadline_s):
                    raise DeadlineError(
                        f"weights of step {step} wait for the engine: those who sample by weights of step "
                        f"{self.held} were not done after {self._deadline_s:g} s"
                    )
        finally:
            self._line.remove(me)
            self._changed.notify_all()
