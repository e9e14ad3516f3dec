"""Measure how long work was in progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager


class BusyTime:
    """Seconds during which at least one piece of work was open. Not thread-safe."""

    def __init__(self) -> None:
        self._done, self._open, self._since = 0.0, 0, 0.0

    @property
    def seconds(self) -> float:
        return self._done + (time.monotonic() - self._since if self._open else 0.0)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Measure a piece of work inside the context."""
        if not self._open:
            self._since = time.monotonic()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._done += time.monotonic() - self._since


class SharedBusyTime:
    """Busy time divided among several names, in proportion to their tokens while they work concurrently."""

    def __init__(self, names: Iterable[str]) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        self._open, self._since, self._tokens = 0, 0.0, Counter[str]()

    @contextmanager
    def work(self, name: str, tokens: int) -> Iterator[None]:
        """Measure a piece of work of one name inside the context."""
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


class OverlapFraction:
    """Fraction of streamed scoring time that overlapped the rollout, of models in other processes."""

    def __init__(self) -> None:
        self._open = BusyTime()
        self._tail_s = self._scoring_s = self._last_session = 0.0

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Measure a rollout, until all its sessions are scored."""
        before, self._last_session = self._open.seconds, time.perf_counter()
        yield
        self._tail_s += time.perf_counter() - self._last_session
        self._scoring_s += self._open.seconds - before

    def session_ended(self) -> None:
        """Record the end of a session. Scoring after the last one does not overlap."""
        self._last_session = time.perf_counter()

    def scoring(self) -> AbstractContextManager[None]:
        return self._open.work()

    def take(self) -> float | None:
        """Return the fraction since the last call, or None without streamed scoring."""
        tail_s, scoring_s = self._tail_s, self._scoring_s
        self._tail_s = self._scoring_s = 0.0
        return 1.0 - min(1.0, tail_s / scoring_s) if scoring_s else None
