"""Weights on their way to the engines, and the probe after each sync: engine and learner say the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, contiguous_format

from practicum.checks import invariants
from practicum.checks.watch import Watch
from practicum.models.fingerprint import LENGTH
from practicum.recipe.schema.recipe import Recipe

_LIMITS = {"bfloat16": 0.2}
_LIMIT = 1e-3
"""Largest mean |difference| of logprobs in nats, if the recipe says none; by the model's number type."""


class SyncProbe:
    """Compares fingerprints, and remembers them for the next time."""

    def __init__(self, recipe: Recipe, watch: Watch) -> None:
        self._watch = watch
        most = recipe.checks.fingerprint_max
        self._limit = _LIMITS.get(recipe.model.dtype, _LIMIT) if most is None else most
        self._before: dict[int, tuple[Sequence[float], Sequence[float]]] = {}
        self.length = LENGTH
        """Tokens of the sequence that the engines were compared by last."""

    @property
    def looks(self) -> bool:
        """Whether the recipe wants it."""
        return self._watch.looks_at("fingerprint")

    def check(self, found: Sequence[Sequence[float]], learner: Callable[[int], Sequence[float]]) -> None:
        """Fingerprints of the engines; `learner` gives its own, for a sequence of this many tokens."""
        lengths = {len(one) + 1 for one in found}
        expected = {length: learner(length) for length in sorted(lengths)}
        self.length = max(lengths)
        for number, one in enumerate(found):
            own, before = expected[len(one) + 1], self._before.get(number)
            self._before[number] = one, own
            finding = invariants.fingerprint(one, own, self._limit, before)
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
        """A copy on the same device, which later updates do not reach."""
        copied = {name: x.detach().clone(memory_format=contiguous_format) for name, x in weights}
        return cls(copied, version, tuple(fingerprint))

    def save(self, folder: Path, step: int) -> None:
        """Write them into a checkpoint, as those after this step."""
        folder.mkdir(parents=True, exist_ok=True)
        about = {"version": str(self.version), "fingerprint": json.dumps(self.fingerprint)}
        save_file(dict(self.weights), folder / f"{step}.safetensors", metadata=about)

    @classmethod
    def load_all(cls, folder: Path) -> dict[int, PublishedWeights]:
        """What `save` wrote, by step."""
        weights_of_step = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                about = file.metadata()
            fingerprint = tuple(json.loads(about["fingerprint"]))
            weights_of_step[int(path.stem)] = cls(load_file(path), int(about["version"]), fingerprint)
        return weights_of_step
