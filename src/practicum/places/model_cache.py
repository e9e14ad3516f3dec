"""Colocated models, and where they are while they sleep: on their device, in the host's memory, or on disk.

The one that was used last stays nearest. On a CPU the device's memory is the host's, so what does not fit
there goes to disk.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from transformers import PreTrainedModel

from practicum.errors import EngineError, PracticumError, TeacherError
from practicum.models.offloaded_weights import OffloadTarget, distinct_tensors, named_tensors

Level = Literal["device", "host", "disk"]


class _Sleeps(Protocol):
    def wake(self) -> None:
        """Be ready, with the weights on the device."""
        ...

    def sleep(self) -> Any:
        """Take no more work until `wake`; the weights stay where they are."""
        ...

    def offload(self, where: OffloadTarget) -> Any:
        """Move a sleeping model's weights to the host's memory or to disk."""
        ...


class Sleepable(_Sleeps, Protocol):
    """A model that sleeps and wakes; `nbytes` is the size of its weights. `on_cpu`: its memory is the host's.

    Names are unique among all models of a cache.
    """

    name: str
    nbytes: int
    on_cpu: bool


class SleepableEngine(_Sleeps, Protocol):
    """What computes a colocated model; it is awake at first."""

    def close(self) -> None:
        """Stop; work under way fails."""
        ...


class ColocatedModel:
    """A frozen model in this process, which works between `wake` and `sleep`. `who` begins its errors.

    `owned`: its weights are nobody else's; else they stay where they are, and its adapters count alone.
    """

    def __init__(
        self, name: str, who: str, model: PreTrainedModel, engine: SleepableEngine, *, owned: bool = True
    ) -> None:
        self.name, self.who, self.model, self._engine, self.owned = name, who, model, engine, owned
        self.close = engine.close
        own = distinct_tensors(model) if owned else named_tensors(model).values()
        self.nbytes = sum(tensor.nbytes for tensor in own)
        self.on_cpu = model.device.type == "cpu"
        self.busy_s, self._woken = 0.0, time.perf_counter()

    def wake(self) -> None:
        """Bring the weights back to the device."""
        self._woken = time.perf_counter()
        self._engine.wake()

    def sleep(self) -> None:
        """Stop working; the weights stay where they are until `offload`."""
        self._engine.sleep()
        self.busy_s += time.perf_counter() - self._woken

    def offload(self, where: OffloadTarget) -> None:
        """Move a sleeping model's weights, if they are its own."""
        if self.owned:
            self._engine.offload(where)

    @contextmanager
    def named_errors(self, about: str) -> Iterator[None]:
        """Errors of the engine as TeacherErrors that name the model and what it worked on."""
        try:
            yield
        except EngineError as error:
            raise TeacherError(f"{self.who} failed in {about}: {error}") from error


class ModelCache:
    """Wakes one model at a time, whichever threads ask, and keeps the sleeping ones within budgets (bytes).

    Without a device budget all stay where they are on a CPU, and none on another device.
    """

    def __init__(self, models: Sequence[Sleepable], device: float | None, host: float | None) -> None:
        self._models = {model.name: model for model in models}
        self._device, self._host = device, math.inf if host is None else host
        self._turn = threading.Lock()
        self._order: list[str] = []
        """Names, the one used last at the end."""
        self._level: dict[str, Level] = {}
        self.wakes: dict[str, int] = dict.fromkeys(self._models, 0)
        for model in models:
            self._put_to_sleep(model)

    def level(self, name: str) -> Level:
        """Where a sleeping model's weights are."""
        return self._level[name]

    @contextmanager
    def awake(self, name: str) -> Iterator[None]:
        """The model is awake in the block and asleep after it, even after an error.

        An error in the block is the one that surfaces, even if the model can't be put to sleep after it.
        """
        model = self._models[name]
        with self._turn:
            self.wakes[name] += 1
            self._make_room(model)
            try:
                model.wake()
            except (PracticumError, OSError, RuntimeError) as error:
                raise EngineError(f"{name} can't be woken: {error}") from error
            try:
                yield
            except BaseException as error:
                try:
                    self._put_to_sleep(model)
                except PracticumError as also:
                    error.add_note(f"{name} could not be put to sleep either: {also}")
                raise
            self._put_to_sleep(model)

    def _put_to_sleep(self, model: Sleepable) -> None:
        """Put it to sleep, then move the least recently used ones until all budgets hold."""
        model.sleep()
        name = model.name
        self._order = [*(other for other in self._order if other != name), name]
        self._level[name] = "device"
        self._make_room()

    def _make_room(self, waking: Sleepable | None = None) -> None:
        """Move models until the budgets hold, with the one that is about to wake on the device too."""
        for name in self._beyond("device", waking):
            self._move(name, "disk" if self._models[name].on_cpu else "host")
        for name in self._beyond("host"):
            self._move(name, "disk")

    def _beyond(self, level: Level, waking: Sleepable | None = None) -> list[str]:
        """Models of a level that do not fit its budget, counted from the one used last.

        One that is too large for what is left takes no room from those used before it; `waking` comes first.
        """
        beyond, used = [], 0 if waking is None else waking.nbytes
        for name in reversed(self._order):
            if self._level[name] == level and (waking is None or name != waking.name):
                model = self._models[name]
                if used + model.nbytes > self._budget(level, model):
                    beyond.append(name)
                else:
                    used += model.nbytes
        return beyond[::-1]

    def _budget(self, level: Level, model: Sleepable) -> float:
        if level == "host":
            return self._host
        if self._device is None:
            return math.inf if model.on_cpu else 0
        return self._device

    def _move(self, name: str, where: OffloadTarget) -> None:
        self._models[name].offload(where)
        self._level[name] = where
