"""The student's engines: how they are made, which weights they have, and the probe after each sync."""

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
"""Largest mean |difference| of logprobs in nats, by the model's dtype."""


def make_engines(
    rollout: Rollout, path: str | None, models: Iterable[PreTrainedModel], weights: WeightSource
) -> list[Engine]:
    """Return an engine for each copy of the student from `path`; if one can't be made, none stays behind."""
    engines, kind = list[Engine](), ENGINES[rollout.engine]
    with ExitStack() as undo:
        for model in models:
            engines.append(kind.for_rollout(rollout, path, model, weights))
            undo.callback(engines[-1].close)
        undo.pop_all()
    kind.share_order(engines)
    return engines


def describe_engines(*engines: Scorer) -> list[str]:
    """Return what the engines say of themselves, and a warning of more threads than the machine has cores."""
    distinct = list(dict.fromkeys(engines))
    lines = [line for engine in distinct for line in engine.describe()]
    threads, cores = torch.get_num_threads() + sum(engine.threads for engine in distinct), os.cpu_count() or 1
    if threads > torch.get_num_threads() and threads > cores:
        lines.append(
            f"{threads} threads may work concurrently on {cores} cores, and slow each other down: lower "
            "runtime.threads"
        )
    return lines


class SyncProbe:
    """Compares fingerprints of engines and learner, and remembers them for the next time."""

    def __init__(self, dtype: str, watch: Watch) -> None:
        self._watch, self._limit = watch, _LIMITS.get(dtype, _LIMIT)
        self._before: dict[int, tuple[Sequence[float], Sequence[float]]] = {}
        self.length = LENGTH
        """Tokens of the sequence that the engines were compared by last."""

    @property
    def looks(self) -> bool:
        return self._watch.looks_at("fingerprint")

    def check(self, found: Sequence[Sequence[float]], learner: Callable[[int], Sequence[float]]) -> None:
        """Check fingerprints of engines; `learner` returns its own, for a sequence of this many tokens."""
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
    """The learner's, if it is checked."""

    @classmethod
    def copy(
        cls, weights: Iterable[tuple[str, Tensor]], version: int, fingerprint: Sequence[float] = ()
    ) -> PublishedWeights:
        """Copy weights on their device; later updates do not reach the copy."""
        copied = {name: x.detach().clone(memory_format=contiguous_format) for name, x in weights}
        return cls(copied, version, tuple(fingerprint))

    def save(self, folder: Path, step: int) -> None:
        """Write them into a checkpoint, as those after this step."""
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


class WeightTurns:
    """A lock on the weights of one engine, which keeps them until all who sample with them are done.

    Whoever needs others waits in line. Weights are named by the step that they are after. `deadline_s` is the
    time in which one of those who sample must be done.
    """

    def __init__(self, deadline_s: float, held: int | None = None) -> None:
        self._deadline_s, self.held = deadline_s, held
        self._users = 0
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def use(self, step: int, load: Callable[[], None]) -> Iterator[None]:
        """Inside, the engine has the weights after this step; `load` loads them, unless it has them."""
        with self._changed:
            self._wait(step)
            if self.held != step:
                self.held = None  # if they can't be loaded, it has none that are known
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
                        f"weights of step {step} wait for the engine: those who sample by weights of step "
                        f"{self.held} were not done after {self._deadline_s:g} s"
                    )
        finally:
            self._line.remove(me)
            self._changed.notify_all()
