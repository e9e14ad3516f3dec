"""Keep sleeping colocated models on their device, in host memory or on disk.

The most recently used models stay on the device.
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
    """Wakes one model at a time, from any thread, and limits sleeping models to `budget` bytes.

    Models beyond the budget are moved: on a CPU to disk, else to host memory. Without a budget, all stay in
    place on a CPU, and none stay on another device.
    """

    def __init__(self, models: Mapping[str, Sleeper], budget: float | None) -> None:
        self._models = dict(models)
        self._sizes = {name: model.own_bytes for name, model in models.items()}
        self._budget = budget
        self._turn = threading.Lock()
        self._order: list[str] = []
        """Names, ordered from least to most recently used."""
        self._level: dict[str, Level] = {}
        self.wakes: dict[str, int] = dict.fromkeys(self._models, 0)
        for name in models:
            self._put_to_sleep(name)

    def level(self, name: str) -> Level:
        """Return the location of a sleeping model's weights."""
        return self._level[name]

    @contextmanager
    def awake(self, name: str) -> Iterator[None]:
        """Keep the model awake inside the context, and put it to sleep afterwards, even after an error. If
        putting it to sleep fails too, the error of the context is raised."""
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
        """Put it to sleep, then move the least recently used models until the rest fit the budget."""
        self._models[name].sleep()
        self._order = [*(other for other in self._order if other != name), name]
        self._level[name] = "device"
        self._make_room()

    def _make_room(self, waking: str | None = None) -> None:
        """Move models off the device that do not fit the budget, counting from the most recently used.

        A model that is too large for the remaining budget is skipped. The model that is about to wake has
        priority.
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
