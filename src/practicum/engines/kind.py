"""Creation of engines: the interface `EngineKind`, which each kind in `table.ENGINES` implements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

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
    """The weights of a teacher that is a copy of the student, or None before the first update."""

    weights: dict[str, Tensor] | None = None
    version: int = 0


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """Settings of a model that only scores: source, adapters and required sizes."""

    key: str
    """Its section of the recipe, such as teachers.math."""
    spec: Model
    seed: int
    settings: Teacher
    """Settings of the first of several teachers on one base."""
    model_key: str
    """The key that names the model's folder, for errors."""
    about: str
    """Description of the model, for errors."""
    batch_tokens: int
    context: int | None
    """Maximum sequence length that the teachers set, or None if one sets none."""
    top_k: int
    adapters: Sequence[SavedAdapter] = ()
    """Distinct adapters."""
    student: PreTrainedModel | None = None
    """The student in this process, if the model is a copy or the base of it."""
    held: HeldWeights | None = None
    """Set for a copy of the student."""


class EngineKind(Protocol):
    """One kind of engine."""

    shares_model: bool
    """True if it uses the given model object, so that a lag needs copies of the model."""
    module: str
    """The package that it imports, and the command that installs it."""
    install: str
    hosts_lag: bool
    """True if engines that sample next to a learner on the CPU need a separate process."""
    recurrent: str
    """The models with recurrent layers that it runs, for errors. Empty if it runs all."""

    def runs_recurrent(self, config: PreTrainedConfig) -> bool:
        """Return True if it runs the recurrent layers of a model with this config."""
        ...

    def for_rollout(
        self, rollout: Rollout, path: str | None, model: PreTrainedModel, weights: WeightSource
    ) -> Engine:
        """Return the engine that samples the responses of the student from `path`, with its current weights.
        An engine with separate weights loads those of `weights`, immediately and at each wake-up."""
        ...

    def share_order(self, engines: Sequence[Engine]) -> None:
        """Make engines of one process take turns if they compete for its cores."""
        ...

    def merges_adapter(self, model: PreTrainedModel) -> bool:
        """Return True if it supports this model's adapter only when merged into the weights."""
        ...

    def adapter_problem(self, saved: SavedAdapter, family: str) -> str | None:
        """Return why it can't compute an adapter of a model of this family, or None."""
        ...

    def for_scoring(self, model: FrozenModel) -> Engine:
        """Return an engine that scores while this process waits."""
        ...

    def in_own_process(self, model: FrozenModel, own: Own) -> list[Engine]:
        """Return engines in separate processes, which load the model concurrently. Call `ready` on each."""
        ...
