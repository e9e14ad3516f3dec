"""The student's engines: creation, weight versions, and the probe after each sync."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, contiguous_format
from transformers import PreTrainedModel

from practicum.checks import invariants
from practicum.checks.watch import Watch
from practicum.engines.kind import WeightSource
from practicum.engines.protocol import Engine, Scorer
from practicum.engines.table import ENGINES
from practicum.errors import DeadlineError
from practicum.models.fingerprint import LENGTH
from practicum.recipe.schema.rollout_sections import Rollout

_LIMITS = {"bfloat16": 0.2}
_LIMIT = 1e-3
"""Maximum mean |difference| of logprobs in nats, by the model's dtype."""


def make_engines(
    rollout: Rollout, path: str | None, models: Iterable[PreTrainedModel], weights: WeightSource
) -> list[Engine]:
    """Create an engine for each copy of the student from `path`. If one fails, stop all."""
    engines, kind = list[Engine](), ENGINES[rollout.engine]
    with ExitStack() as undo:
        for model in models:
            engines.append(kind.for_rollout(rollout, path, model, weights))
            undo.callback(engines[-1].close)
        undo.pop_all()
    kind.share_order(engines)
    return engines


def describe_engines(*engines: Scorer) -> list[str]:
    """Return the engines' descriptions, and a warning about more threads than cores."""
    distinct = list(dict.fromkeys(engines))
    lines = [line for engine in distinct for line in engine.describe()]
    threads, cores = torch.get_num_threads() + sum(engine.threads for engine in distinct), os.cpu_count() or 1
    if threads > torch.get_num_threads() and threads > cores:
        lines.append(
            f"{threads} threads may run concurrently on {cores} cores and slow each other down: lower "
            "runtime.threads"
        )
    return lines


class SyncProbe:
    """Compares fingerprints of engines and learner, and stores them for the next comparison."""

    def __init__(self, dtype: str, watch: Watch) -> None:
        self._watch, self._limit = watch, _LIMITS.get(dtype, _LIMIT)
        self._before: dict[int, tuple[Sequence[float], Sequence[float]]] = {}
        self.length = LENGTH
        """Length of the probe sequence of the last comparison."""

    @property
    def looks(self) -> bool:
        return self._watch.looks_at("fingerprint")

    def check(self, found: Sequence[Sequence[float]], learner: Callable[[int], Sequence[float]]) -> None:
        """Check fingerprints of engines. `learner` returns its own for a sequence of this many tokens."""
        lengths = {len(fingerprint) + 1 for fingerprint in found}
        expected = {length: learner(length) for length in sorted(lengths)}
        self.length = max(lengths)
        for number, fingerprint in enumerate(found):
            own, before = expected[len(fingerprint) + 1], self._before.get(number)
            self._before[number] = fingerprint, own
            finding = invariants.fingerprint(fingerprint, own, self._limit, before)
            if finding is not None and len(found) > 1:
                finding = f"engine {number}: {finding}"
            self._watch("fingerprint", finding)


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """A copy of the learner's weights after a step, which engines may take later."""

    weights: Mapping[str, Tensor]
    version: int
    fingerprint: tuple[float, ...] = ()
    """The learner's fingerprint, if it is checked."""

    @classmethod
    def copy(
        cls, weights: Iterable[tuple[str, Tensor]], version: int, fingerprint: Sequence[float] = ()
    ) -> PublishedWeights:
        """Copy weights on their device. Later updates do not change the copy."""
        copied = {name: x.detach().clone(memory_format=contiguous_format) for name, x in weights}
        return cls(copied, version, tuple(fingerprint))

    def save(self, folder: Path, step: int) -> None:
        """Write the weights of this step into a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        about = {"version": str(self.version), "fingerprint": json.dumps(self.fingerprint)}
        save_file(dict(self.weights), folder / f"{step}.safetensors", metadata=about)

    @classmethod
    def load_all(cls, folder: Path) -> dict[int, PublishedWeights]:
        """Return what `save` wrote, by step."""
        weights_of_step = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                about = file.metadata()
            fingerprint = tuple(json.loads(about["fingerprint"]))
            weights_of_step[int(path.stem)] = cls(load_file(path), int(about["version"]), fingerprint)
        return weights_of_step


class WeightLock:
    """Reader lock over an engine's weights: they change only when no reader samples with them.

    Readers of other weights queue. Weights are named by their step. `deadline_s` is the deadline for a reader
    to finish.
    """

    def __init__(self, deadline_s: float, held: int | None = None) -> None:
        self._deadline_s, self.held = deadline_s, held
        self._users = 0
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def use(self, step: int, load: Callable[[], None]) -> Iterator[None]:
        """Hold the weights of this step inside the context. `load` loads them if needed."""
        with self._changed:
            self._wait(step)
            if self.held != step:
                self.held = None  # unknown if loading fails
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
                        f"weights of step {step} wait for the engine: sampling with the weights of step "
                        f"{self.held} did not finish within {self._deadline_s:g} s"
                    )
        finally:
            self._line.remove(me)
            self._changed.notify_all()
