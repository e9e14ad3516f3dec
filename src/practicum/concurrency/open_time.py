"""How long work was under way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
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


class SharedTime:
    """Seconds of work that several share, by their tokens in each stretch of work that is open at once."""

    def __init__(self, names: Iterable[str]) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        self._open, self._since, self._tokens = 0, 0.0, Counter[str]()

    @contextmanager
    def work(self, name: str, tokens: int) -> Iterator[None]:
        """One piece of work of one of them, from here to the end of the block."""
        if not self._open:
            self._since = time.perf_counter()
            self._tokens.clear()
        self._open += 1
        self._tokens[name] += tokens
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                a_token = (time.perf_counter() - self._since) / self._tokens.total()
                for each, count in self._tokens.items():
                    self.seconds[each] += count * a_token
