"""One data-parallel rank as an actor: `roles.train_rank.TrainRank`, and its weights for engines elsewhere.

All ranks are called alike and with whole batches; each finds its own rows by their tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import ray
from transformers import PreTrainedModel

from practicum.checks.watch import Watch
from practicum.dataplane.stages import Plan
from practicum.devices import pick_device
from practicum.learning.parallel import Parallel, free_port
from practicum.models.attention import OutputHead
from practicum.models.weight_files import load_for_ranks
from practicum.recipe.derived import data_parallel, scores_during_rollout
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.roles.load_teachers import load_teachers
from practicum.roles.make_engine import Weights
from practicum.roles.run_stage import StepInfo
from practicum.roles.sync import PublishedWeights
from practicum.roles.teachers import Teachers, copy_file, read_copy
from practicum.roles.train_rank import TrainRank
from practicum.runtime.ray.weight_transport import Manifest, publish, receive
from practicum.runtime.ray.worker import RankReply, StoreHandle, Worker


@dataclass(frozen=True, slots=True)
class StudentFacts:
    """What the controller must know of the student."""

    stop: frozenset[int]
    version: int


class PublishingRank(TrainRank):
    """A rank whose weights go to engines and teachers in other processes."""

    def run(self, stage: str, step: StepInfo) -> Any:
        """Run a stage on this rank; gives its report."""
        return self.stages[stage](step)

    def publish(self) -> Manifest | None:
        """The weights for the engines, by the first rank; all ranks must be called."""
        learner = self.student.learner
        if self.rank == 0:
            return self._put(learner.named_weights(), learner.version)
        for _ in learner.named_weights():
            pass  # takes part in gathering each
        return None

    def save_published(
        self, manifest: Manifest, fingerprint: Sequence[float], folder: Path, step: int
    ) -> None:
        """Write weights that were published after an earlier step into a checkpoint."""
        received = receive(manifest, timeout=self.recipe.runtime.store_s)
        PublishedWeights.copy(received, manifest.version, fingerprint).save(folder, step)

    def publish_saved(self, folder: Path) -> dict[int, tuple[Manifest, tuple[float, ...]]]:
        """Publish what `save_published` wrote, by step, each with the learner's fingerprint of then."""
        saved = PublishedWeights.load_all(folder)
        return {
            step: (self._put(weights.weights.items(), weights.version), weights.fingerprint)
            for step, weights in saved.items()
        }

    def publish_copy(self, folder: Path, name: str) -> Manifest | None:
        """The weights that a teacher elsewhere, a copy of the student, had when it saved them, if it did.

        Called on one rank, which lives as long as the run: those of a teacher would die with it.
        """
        path = copy_file(folder, name)
        if not path.is_file():
            return None
        weights, version = read_copy(path)
        return self._put(weights.items(), version)

    def _put(self, weights: Weights, version: int) -> Manifest:
        return publish(weights, version, self.recipe.runtime.weight_transport)


class TrainWorker(Worker):
    """A rank. `begin` makes it ready; then `call` calls the rank's methods."""

    LASTING = False

    def __init__(self, recipe: Recipe, handle: StoreHandle, plan: Plan, rank: int) -> None:
        super().__init__(recipe, handle)
        self.plan, self.rank = plan, rank
        self._sentences: list[str] = []
        self.watch = Watch(recipe.checks, self._sentences.append)
        self.parallel: Parallel | None = None

    def meeting_point(self) -> tuple[str, int]:
        """An address of this rank's machine, and a port that is free on it."""
        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def begin(self, meeting: tuple[str, int], names: Sequence[str] = (), *heads: OutputHead) -> StudentFacts:
        """Join the others at this address and port, and load the models.

        `heads` are those of the teachers elsewhere of these names.
        """
        recipe, plan, world = self.recipe, self.plan, data_parallel(self.recipe)
        shards = 1 if self._has_teachers_of_student() else world
        model, files = load_for_ranks(recipe.model, recipe.seed, shards)
        if world > 1:
            timeout_s, device = recipe.runtime.stage_s, pick_device(recipe.model.device).type
            self.parallel = Parallel.join(self.rank, world, *meeting, timeout_s, device)
        teachers = self._load_teachers(model, dict(zip(names, heads, strict=True)))
        self.roles = PublishingRank(
            recipe, plan, self.store, self.watch, model, teachers, self.parallel, files
        )
        return StudentFacts(self.roles.stop, self.roles.version)

    def _colocated(self) -> dict[str, Teacher]:
        teachers = self.recipe.teachers.items() if "teachers" in self.plan else ()
        return {name: teacher for name, teacher in teachers if not scores_during_rollout(teacher)}

    def _has_teachers_of_student(self) -> bool:
        """Whether teachers that every rank has whole are copies of the student, or adapters on its base."""
        return any(teacher.model is None and teacher.url is None for teacher in self._colocated().values())

    def _load_teachers(self, model: PreTrainedModel, heads: dict[str, OutputHead]) -> Teachers | None:
        if "teachers" not in self.plan:
            return None
        return load_teachers(self.recipe, model, names=list(self._colocated()), heads=heads)

    def call(self, method: str, *args: Any) -> RankReply:
        """Call a method of the rank, such as `run` for its stages, or of a role of it: `teachers.spent`."""
        value = attrgetter(method)(self.roles)(*args)
        sentences, fired = tuple(self._sentences), dict(self.watch.fired)
        self._sentences.clear()
        self.watch.fired.clear()
        return RankReply(value, sentences, fired)

    def leave(self) -> None:
        """Disconnect from the other ranks, so that all end well."""
        if self.parallel is not None:
            self.parallel.close()
