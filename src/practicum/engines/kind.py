"""How an engine is made: `EngineKind` is what a kind of engine offers, `table.ENGINES` has all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from practicum.engines.protocol import Engine
from practicum.models.adapter_files import SavedAdapter
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.rollout_sections import Rollout
from practicum.recipe.schema.teacher_sections import Own, Teacher

Weights = Iterable[tuple[str, Tensor]]
WeightSource = Callable[[], tuple[Weights, int]]
"""Returns weights and their version."""


@dataclass(slots=True)
class HeldWeights:
    """The weights of a teacher that is a copy of the student, or None until it has taken any."""

    weights: dict[str, Tensor] | None = None
    version: int = 0


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that is only scored with: how it is loaded, the adapters on it, and the sizes it must have."""

    key: str
    """Its section of the recipe, such as teachers.math."""
    spec: Model
    seed: int
    settings: Teacher
    """Of several teachers on one base, those of the first."""
    model_key: str
    """The key that names the model's folder, for errors."""
    about: str
    """The model in a phrase, for errors."""
    batch_tokens: int
    context: int | None
    """Longest sequence of the teachers that limit it, or None if one does not."""
    top_k: int
    adapters: Sequence[SavedAdapter] = ()
    """Each once."""
    student: PreTrainedModel | None = None
    """The student in this process, if the model is a copy of it or may be its base."""
    held: HeldWeights | None = None
    """Set for a copy of the student."""


class EngineKind(Protocol):
    """One kind of engine."""

    shares_model: bool
    """True if it computes with the model object it is given, so that a lag needs copies of the model."""
    module: str
    """The package that it imports, and how to `install` it."""
    install: str
    hosts_lag: bool
    """True if engines that sample beside a learner on the CPU belong in a separate process."""
    runs_states: bool
    """True if it was tried with layers that carry a state."""

    def for_rollout(
        self, rollout: Rollout, path: str | None, model: PreTrainedModel, weights: WeightSource
    ) -> Engine:
        """Return the engine that samples the responses of the student from `path`, with its current weights.

        An engine with its own weights takes those of `weights`, now and whenever it wakes.
        """
        ...

    def share_order(self, engines: Sequence[Engine]) -> None:
        """Have engines of one process take turns, where they compete for its cores."""
        ...

    def merges_adapter(self, model: PreTrainedModel) -> bool:
        """Return True if it takes this model's adapter only merged into the weights."""
        ...

    def adapter_problem(self, saved: SavedAdapter, family: str) -> str | None:
        """Return why it can't compute an adapter of a model of this family, or None."""
        ...

    def for_scoring(self, model: FrozenModel) -> Engine:
        """Return an engine that scores while this process waits."""
        ...

    def in_own_process(self, model: FrozenModel, own: Own) -> list[Engine]:
        """Return engines in separate processes, which load the model concurrently: see `ready`."""
        ...
