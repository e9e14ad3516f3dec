"""Where colocated models lie while they sleep: on their device, in the host's memory, or on disk.

The one that was used last stays nearest. On a CPU the device's memory is the host's, so what does not fit
there goes to disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

from practicum.errors import EngineError, PracticumError
from practicum.models.offloaded_weights import OffloadTarget

Level = Literal["device", "host", "disk"]


class Sleepable(Protocol):
    """A model that sleeps and wakes; `nbytes` are its weights'. `on_cpu`: its memory is the host's."""

    name: str
    nbytes: int
    on_cpu: bool

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def put_aside(self, where: OffloadTarget) -> None: ...


class ModelCache:
    """Wakes one model at a time and keeps the sleeping ones within budgets (bytes).

    Without a device budget all stay where they are on a CPU, and none on another device.
    """

    def __init__(self, sleepers: Sequence[Sleepable], device: float | None, host: float | None) -> None:
        self._sleepers = {sleeper.name: sleeper for sleeper in sleepers}
        self._device, self._host = device, math.inf if host is None else host
        self._order: list[str] = []
        """Names, the one used last at the end."""
        self._level: dict[str, Level] = {}
        self.wakes: dict[str, int] = dict.fromkeys(self._sleepers, 0)
        for sleeper in sleepers:
            self._rest(sleeper)

    def level(self, name: str) -> Level:
        """Where a sleeping model's weights are."""
        return self._level[name]

    @contextmanager
    def awake(self, name: str) -> Iterator[None]:
        """The model is awake inside and asleep after, whatever happens.

        What goes wrong inside is what surfaces, even if the model then can't be put to sleep.
        """
        sleeper = self._sleepers[name]
        self.wakes[name] += 1
        self._make_room(sleeper)
        try:
            sleeper.wake()
        except (PracticumError, OSError, RuntimeError) as error:
            raise EngineError(f"{name} can't be woken: {error}") from error
        try:
            yield
        except BaseException as error:
            try:
                self._rest(sleeper)
            except PracticumError as also:
                error.add_note(f"{name} could not be put to sleep either: {also}")
            raise
        self._rest(sleeper)

    def _rest(self, sleeper: Sleepable) -> None:
        """Put it to sleep, then move the least recently used ones until all budgets hold."""
        sleeper.sleep()
        name = sleeper.name
        self._order = [*(other for other in self._order if other != name), name]
        self._level[name] = "device"
        self._make_room()

    def _make_room(self, awake: Sleepable | None = None) -> None:
        """Move models until the budgets hold, with the one that is about to wake on the device too."""
        for name in self._beyond("device", awake):
            on_cpu = self._sleepers[name].on_cpu
            self._move(name, "disk" if on_cpu else "host")
        for name in self._beyond("host"):
            self._move(name, "disk")

    def _beyond(self, level: Level, awake: Sleepable | None = None) -> list[str]:
        """Models of a level that do not fit its budget, counted from the one used last.

        One that is too large for what is left takes no room from those used before it; `awake` comes first.
        """
        beyond, used = [], 0 if awake is None else awake.nbytes
        for name in reversed(self._order):
            if self._level[name] == level and (awake is None or name != awake.name):
                sleeper = self._sleepers[name]
                if used + sleeper.nbytes > self._budget(level, sleeper):
                    beyond.append(name)
                else:
                    used += sleeper.nbytes
        return beyond[::-1]

    def _budget(self, level: Level, sleeper: Sleepable) -> float:
        if level == "host":
            return self._host
        if self._device is None:
            return math.inf if sleeper.on_cpu else 0
        return self._device

    def _move(self, name: str, where: OffloadTarget) -> None:
        self._sleepers[name].put_aside(where)
        self._level[name] = where
