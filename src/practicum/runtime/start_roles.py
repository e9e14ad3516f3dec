"""Who takes part in a run, as the trainer sees them: keys and tags go in and out, never a tensor.

Each runtime has its own: `local.LocalRoles` in this process, `ray.ray_roles.RayRoles` on Ray. They differ in
where the roles of `roles/` live, not in what these do.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.recipe.derived import on_ray
from practicum.recipe.schema.recipe import Recipe
from practicum.records.record_files import RecordPlace
from practicum.roles.rollout import RolloutRole
from practicum.roles.run_stage import StepInfo
from practicum.roles.transcripts import Transcript
from practicum.runtime.local import start_local
from practicum.runtime.ray.init_ray import set_environment


class Roles(Protocol):
    """All roles of a run. What the plan leaves out is never called."""

    ranks: int
    """Data-parallel ranks of the learner."""
    stop: frozenset[int]
    """Tokens that end an answer."""
    rollouts: list[RolloutRole]
    """One for each step that may be under way: async.lag + 1."""
    eval_rollouts: list[RolloutRole]
    """On the same engines."""

    @property
    def store(self) -> Store:
        """The data plane; the trainer asks it for keys and tags alone."""
        ...

    @property
    def version(self) -> int:
        """Updates that the student's weights have had."""
        ...

    def run(self, stage: str, step: StepInfo) -> Any:
        """Run a stage of the plan on the learner's ranks; gives its report, or None if it had no row."""
        ...

    def describe(self, planned: float | None = None) -> list[str]:
        """The learner's memory, tried with the longest rows, and engines with their own processes, in
        sentences for the log; `planned` are bytes that the learner's process or device is to take."""
        ...

    def refresh_copies(self, step: int) -> None:
        """Before a step: teachers that are copies of the student take its weights when the recipe says."""
        ...

    def teachers_spent(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and wakes of each teacher since the last call."""
        ...

    def publish(self, step: int) -> None:
        """Keep the learner's weights as those after this step; without a lag the engines take them now."""
        ...

    def weights(self, copy: int, step: int) -> AbstractContextManager[None]:
        """The engines of `rollouts[copy]` have the weights after this step inside."""
        ...

    def version_of(self, step: int) -> int:
        """The version of the weights after a step, of those that are kept."""
        ...

    def transcripts(self, batch: BatchRef) -> list[Transcript]:
        """Each row as text: for the few that are recorded."""
        ...

    def session_advantages(self, batch: BatchRef) -> dict[tuple[int, ...], float]:
        """Each session's mean advantage over its sampled tokens, after the stage `advantages`."""
        ...

    def kl_state(self) -> dict[str, float]:
        """State of the controller of a KL in the reward."""
        ...

    def updates(self) -> tuple[int, ...]:
        """Optimizer steps begun so far, wherever they are counted: while it stays, the weights do."""
        ...

    def save(self, folder: Path, *, rows: bool = True) -> None:
        """Write all that the roles hold between two steps; without `rows`, with an empty store."""
        ...

    def load(self, folder: Path, kl_state: Mapping[str, float]) -> Any:
        """Continue from what `save` wrote; the engines get the weights too."""
        ...

    def export(self, folder: Path) -> None:
        """Write the student in HuggingFace format, with its tokenizer and processor."""
        ...

    def incidents(self) -> dict[str, Any]:
        """What failed and was repaired since the last call, as metrics; empty if nothing did."""
        ...

    def close(self) -> None:
        """Stop what runs in the background."""
        ...


def start_roles(recipe: Recipe, plan: Plan, watch: Watch, record: RecordPlace | None = None) -> Roles:
    """Everyone who takes part, in the runtime that the recipe names; if that fails, nothing stays behind.

    With `record`, whoever holds rows that are recorded writes them there.
    """
    if recipe.runtime.kind == "local":
        return start_local(recipe, plan, watch, record)
    set_environment(recipe.runtime)
    from practicum.runtime.ray.start_ray import start_ray

    return start_ray(recipe, plan, watch, record)


def loading(recipe: Recipe) -> str:
    """What the start of a recipe's roles is busy with, in words."""
    spec, frozen = recipe.model, [*recipe.teachers.items(), *recipe.reward.models.items()]
    what = "making a model with random weights" if spec.path is None else f"loading model {spec.path}"
    beside = ", ".join(name for name, model in frozen if model.url is None)
    where = "starting Ray: " if on_ray(recipe) else ""
    return f"{where}{what}{f' and {beside}' if beside else ''}"
