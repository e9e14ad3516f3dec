"""Threads of tests: their results and errors are handed over, and none can hang a test run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 60.0
"""Seconds after which a thread counts as stuck; nothing takes as long when all is well."""


class Worker:
    """A thread whose result, or error, is handed over by `wait`."""

    def __init__(self, work: Callable[..., Any], *args: object) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work, args), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[..., Any], args: tuple[object, ...]) -> None:
        try:
            self._result = work(*args)
        except BaseException as error:
            self._error = error

    def wait(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the thread is stuck"
        if self._error is not None:
            raise self._error
        return self._result


@contextmanager
def fast_switching() -> Iterator[None]:
    """Threads change places as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
