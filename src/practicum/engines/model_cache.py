"""Colocated models, and where they are while they sleep: on their device, in the host's memory, or on disk.

The ones that were used last stay on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from practicum.engines.protocol import Sleeper
from practicum.errors import EngineError, PracticumError
from practicum.recipe.schema.runtime_section import Runtime

Level = Literal["device", "host", "disk"]


class ModelCache:
    """Wakes one model at a time, whichever threads ask, and keeps the sleeping ones within `budget` bytes.

    What goes beyond the budget is moved: on a CPU to disk, else to the host's memory. Without a budget all
    stay where they are on a CPU, and none on another device.
    """

    def __init__(self, models: Mapping[str, Sleeper], budget: float | None) -> None:
        self._models = dict(models)
        self._sizes = {name: model.own_bytes for name, model in models.items()}
        self._budget = budget
        self._turn = threading.Lock()
        self._order: list[str] = []
        """Names, the one used last at the end."""
        self._level: dict[str, Level] = {}
        self.wakes: dict[str, int] = dict.fromkeys(self._models, 0)
        for name in models:
            self._put_to_sleep(name)

    def level(self, name: str) -> Level:
        """Return where a sleeping model's weights are."""
        return self._level[name]

    @contextmanager
    def awake(self, name: str) -> Iterator[None]:
        """Keep the model awake in the block, and put it to sleep after it, even after an error.

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
        """Put it to sleep, then move the least recently used ones until the budget holds."""
        self._models[name].sleep()
        self._order = [*(other for other in self._order if other != name), name]
        self._level[name] = "device"
        self._make_room()

    def _make_room(self, waking: str | None = None) -> None:
        """Move the models on the device that do not fit the budget, counted from the one used last.

        One that is too large for what is left takes no room from those used before it. The one that is
        about to wake comes first.
        """
        beyond, used = [], 0 if waking is None else self._sizes[waking]
        for name in reversed(self._order):
            if self._level[name] == "device" and name != waking:
                if self._budget is None:
                    fits = self._models[name].on_cpu
                else:
                    fits = used + self._sizes[name] <= self._budget
                if fits:
                    used += self._sizes[name]
                else:
                    beyond.append(name)
        for name in reversed(beyond):
            self._level[name] = where = "disk" if self._models[name].on_cpu else "host"
            self._models[name].offload(where)


def make_model_cache(runtime: Runtime, models: Mapping[str, Sleeper]) -> ModelCache:
    """Put colocated models to sleep within the recipe's budget."""
    return ModelCache(models, None if runtime.teachers_gb is None else runtime.teachers_gb * 2**30)
