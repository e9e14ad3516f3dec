"""How long work was under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class OpenTime:
    """Seconds during which at least one piece of work was open; used by one thread."""

    def __init__(self) -> None:
        self._done, self._open, self._since = 0.0, 0, 0.0

    @property
    def seconds(self) -> float:
        return self._done + (time.monotonic() - self._since if self._open else 0.0)

    @contextmanager
    def work(self) -> Iterator[None]:
        """One piece of work, from here to the end of the block."""
        if not self._open:
            self._since = time.monotonic()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._done += time.monotonic() - self._since
