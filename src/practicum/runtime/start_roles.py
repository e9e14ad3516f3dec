"""The roles of a run, for the trainer. Calls exchange keys and tags, never tensors.

Each runtime implements it: `local.LocalRoles` in this process, `ray.ray_roles.RayRoles` on Ray. They differ
only in where the roles of `roles/` run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.observe.records.record_files import RecordPlace
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.learner_rank import Transcript
from practicum.roles.rollout import RolloutRole
from practicum.roles.run_stage import Stages
from practicum.runtime.local import start_local
from practicum.runtime.ray.init_ray import set_environment


class Roles(Protocol):
    """All roles of a run. Stages that the plan leaves out are never called."""

    ranks: int
    """Data-parallel ranks of the learner."""
    stop: frozenset[int]
    """Tokens that end a response."""
    rollouts: list[RolloutRole]
    """One for each step that may be in flight: rollout.lag + 1."""
    eval_rollouts: list[RolloutRole]
    """On the same engines."""

    @property
    def store(self) -> Store: ...

    @property
    def version(self) -> int:
        """Return the number of updates that the student's weights have had."""
        ...

    @property
    def stages(self) -> Stages:
        """Return the stages of the plan that the ranks of the learner run, and `sync`."""
        ...

    def describe(self) -> list[str]:
        """Describe engines with their own processes, in sentences for the log."""
        ...

    def compare_teachers(self) -> tuple[list[str], list[str]]:
        """Return a table of the teachers beside the student, and warnings. No metric counts this work."""
        ...

    def refresh_copies(self, step: int) -> None:
        """Before a step, have copies of the student take its weights if the recipe says so."""
        ...

    def teachers_spent(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return seconds and wakes of each teacher since the last call."""
        ...

    def publish(self, step: int) -> None:
        """Keep the learner's weights as the version after this step. Without a lag, engines load them."""
        ...

    def weights(self, copy: int, step: int) -> AbstractContextManager[None]:
        """Context manager in which the engines of `rollouts[copy]` have the weights after this step."""
        ...

    def version_of(self, step: int) -> int:
        """Return the version of the weights after a step, of those that are kept."""
        ...

    def transcripts(self, batch: BatchRef) -> list[Transcript]:
        """Return the rows as text."""
        ...

    def session_advantages(self, batch: BatchRef) -> dict[tuple[int, ...], float]:
        """Return each session's mean advantage over its sampled tokens, after the stage `advantages`."""
        ...

    def kl_state(self) -> dict[str, float]: ...

    def updates(self) -> tuple[int, ...]:
        """Return the optimizer steps begun so far: while they stay, the weights do."""
        ...

    def save(self, folder: Path, rows: Collection[Key]) -> None:
        """Write all that the roles hold between two steps, and these rows of the store."""
        ...

    def load(self, folder: Path, kl_state: Mapping[str, float]) -> Any:
        """Restore what `save` wrote, and load the weights into the engines."""
        ...

    def export(self, folder: Path) -> None:
        """Write the student in HuggingFace format, with its tokenizer and processor."""
        ...

    def incidents(self) -> dict[str, Any]:
        """Return the failures that were repaired since the last call, as metrics."""
        ...

    def close(self) -> None: ...


def start_roles(
    recipe: Recipe, plan: Plan, watch: Watch, record: RecordPlace | None = None, folder: Path | None = None
) -> Roles:
    """Start all roles in the recipe's runtime; if that fails, nothing stays behind."""
    if recipe.runtime.kind == "local":
        return start_local(recipe, plan, watch, record)
    set_environment(recipe.runtime)
    from practicum.runtime.ray.start_ray import start_ray

    return start_ray(recipe, plan, watch, record, folder)


def loading(recipe: Recipe) -> str:
    """Return what the start of a recipe's roles is busy with, in words."""
    spec, frozen = recipe.model, [*recipe.teachers.items(), *recipe.reward.models.items()]
    what = "making a model with random weights" if spec.path is None else f"loading model {spec.path}"
    beside = ", ".join(name for name, model in frozen if model.url is None)
    where = "starting Ray: " if recipe.on_ray else ""
    return f"{where}{what}{f' and {beside}' if beside else ''}"
