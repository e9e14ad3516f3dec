"""Colocated models, and where they are while they sleep: on their device, in the host's memory, or on disk.

The one that was used last stays nearest. On a CPU the device's memory is the host's, so what does not fit
there goes to disk.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from practicum.engines.protocol import Sleeper
from practicum.errors import EngineError, PracticumError
from practicum.models.offloaded_weights import OffloadTarget
from practicum.recipe.schema.runtime_section import Runtime

GIB = 2**30

Level = Literal["device", "host", "disk"]


class ModelCache:
    """Wakes one model at a time, whichever threads ask, and keeps the sleeping ones within budgets (bytes).

    Without a device budget all stay where they are on a CPU, and none on another device.
    """

    def __init__(self, models: Mapping[str, Sleeper], device: float | None, host: float | None) -> None:
        self._models = dict(models)
        self._sizes = {name: model.own_bytes for name, model in models.items()}
        self._device, self._host = device, math.inf if host is None else host
        self._turn = threading.Lock()
        self._order: list[str] = []
        """Names, the one used last at the end."""
        self._level: dict[str, Level] = {}
        self.wakes: dict[str, int] = dict.fromkeys(self._models, 0)
        for name in models:
            self._put_to_sleep(name)

    def level(self, name: str) -> Level:
        """Where a sleeping model's weights are."""
        return self._level[name]

    @contextmanager
    def awake(self, name: str) -> Iterator[None]:
        """The model is awake in the block and asleep after it, even after an error.

        An error in the block is the one that surfaces, even if the model can't be put to sleep after it.
        """
        with self._turn:
            self.wakes[name] += 1
            self._make_room(name)
            try:
                self._models[name].wake()
            except (PracticumError, OSError, RuntimeError) as error:
                raise EngineError(f"{name} can't be woken: {error}") from error
            try:
                yield
            except BaseException as error:
                try:
                    self._put_to_sleep(name)
                except PracticumError as also:
                    error.add_note(f"{name} could not be put to sleep either: {also}")
                raise
            self._put_to_sleep(name)

    def _put_to_sleep(self, name: str) -> None:
        """Put it to sleep, then move the least recently used ones until all budgets hold."""
        self._models[name].sleep()
        self._order = [*(other for other in self._order if other != name), name]
        self._level[name] = "device"
        self._make_room()

    def _make_room(self, waking: str | None = None) -> None:
        """Move models until the budgets hold, with the one that is about to wake on the device too."""
        for name in self._beyond("device", waking):
            self._move(name, "disk" if self._models[name].on_cpu else "host")
        for name in self._beyond("host"):
            self._move(name, "disk")

    def _beyond(self, level: Level, waking: str | None = None) -> list[str]:
        """Models of a level that do not fit its budget, counted from the one used last.

        One that is too large for what is left takes no room from those used before it; `waking` comes first.
        """
        beyond, used = [], 0 if waking is None else self._sizes[waking]
        for name in reversed(self._order):
            if self._level[name] == level and name != waking:
                if used + self._sizes[name] > self._budget(level, self._models[name]):
                    beyond.append(name)
                else:
                    used += self._sizes[name]
        return beyond[::-1]

    def _budget(self, level: Level, model: Sleeper) -> float:
        if level == "host":
            return self._host
        if self._device is None:
            return math.inf if model.on_cpu else 0
        return self._device

    def _move(self, name: str, where: OffloadTarget) -> None:
        self._models[name].offload(where)
        self._level[name] = where


def make_model_cache(runtime: Runtime, models: Mapping[str, Sleeper]) -> ModelCache:
    """Put colocated models to sleep within the recipe's budget."""
    device = None if runtime.teachers_gb is None else runtime.teachers_gb * GIB
    return ModelCache(models, device, None)
