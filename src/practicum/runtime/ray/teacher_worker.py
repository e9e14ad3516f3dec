"""A replica of a teacher with its own resources: reads rows from the store, scores them, writes scores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.open_time import OpenTime
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.stages import Plan
from practicum.errors import TeacherError
from practicum.models.attention import OutputHead
from practicum.models.load_model import load_model, load_tokenizer, model_facts
from practicum.places.adapter_teachers import AdapterTeacher, share_base
from practicum.places.remote_teacher import RemoteTeacher
from practicum.places.torch_teacher import ColocatedTeacher, load_teacher
from practicum.places.vllm_base import share_vllm_base
from practicum.places.vllm_teacher import VllmModel, VllmTeacher
from practicum.recipe.derived import own_options
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.load_teachers import signal_width, top_k, vllm_teacher
from practicum.roles.teachers import TeacherRole, Teachers
from practicum.runtime.ray.weight_transport import Manifest, receive
from practicum.runtime.ray.worker import StoreHandle, Worker
from practicum.tasks.prompts import Prompt


class TeacherWorker(Worker):
    """One teacher of the recipe: a model in this process, or a server."""

    def __init__(self, recipe: Recipe, handle: StoreHandle, name: str) -> None:
        super().__init__(recipe, handle, own_options(recipe.teachers[name]).threads)
        self.name = name

    def begin(self, plan: Plan, manifest: Manifest | None) -> None:
        """Load the model; `manifest` are newer weights, for a teacher that is a copy of the student."""
        recipe, name = self.recipe, self.name
        teacher = recipe.teachers[name]
        tokenizer = load_tokenizer(recipe.model)
        _, vocab = model_facts(recipe.model, len(tokenizer))
        if teacher.url is not None:
            self.place = RemoteTeacher(name, teacher)
        else:
            student = load_model(recipe.model, recipe.seed) if teacher.student is not None else None
            self.place = self._model_place(student)
        teachers = Teachers({name: self.place}, least_width=signal_width(recipe))
        self.role = TeacherRole(recipe, plan, self.store, teachers, tokenizer, vocab=vocab)
        self._busy = OpenTime()
        if manifest is not None:
            self.take(manifest)

    def _model_place(
        self, student: PreTrainedModel | None
    ) -> ColocatedTeacher | AdapterTeacher | VllmTeacher:
        teacher = self.recipe.teachers[self.name]
        if teacher.adapter is not None and teacher.engine == "vllm":
            group, most = {self.name: teacher}, top_k(self.recipe)
            return share_vllm_base(self.recipe, group, None, most=most, replicas=1)[self.name]
        if teacher.adapter is not None:
            return share_base(self.recipe, {self.name: teacher}, None)[self.name]
        if teacher.engine == "vllm":
            return vllm_teacher(self.name, self.recipe, student, replicas=1)
        return ColocatedTeacher(self.name, teacher, load_teacher(self.name, teacher, student))

    def score(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> float:
        """Score rows and write the scores; gives the seconds of scoring so far."""
        timeout = self.recipe.teachers[self.name].deadline_s
        owner = f"teacher {self.name} ({len(batch)} rows)"
        run_async(self._score(batch, prompts), timeout=timeout, owner=owner)
        return self._busy.seconds

    async def _score(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        with self._busy.work():
            await self.role.score_session(self.name, batch, prompts)

    def describe(self) -> list[str]:
        """Its engine, if that has its own process."""
        model = self.place.base if isinstance(self.place, AdapterTeacher) else self.place
        return model.describe() if isinstance(model, VllmModel) else []

    def head(self) -> OutputHead:
        """Its output head as it is now."""
        if isinstance(self.place, RemoteTeacher):
            raise TeacherError(f"teacher {self.name} is behind a URL: its weights are not here")
        return self.place.head()

    def take(self, manifest: Manifest) -> None:
        """Become a copy of the student as these weights are."""
        received = receive(manifest, timeout=self.recipe.runtime.store_s)
        # A copy of its own: what was received is a view of memory that others let go of.
        weights = {key: x.clone() for key, x in received}
        self.role.give_weights(self.name, weights, manifest.version)

    def save(self, folder: Path) -> None:
        """Write what it took of the student, for `TrainWorker.publish_copy`."""
        self.role.save(folder)
