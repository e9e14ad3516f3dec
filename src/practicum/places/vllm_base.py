"""Teachers that are adapters, computed by vLLM: one engine has their base, and rows name their adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from practicum.concurrency.open_time import SharedTime
from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.engines.vllm.make_vllm import engine_of_folder, vllm_adapter_problem
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.errors import RecipeError, TeacherError
from practicum.models.adapter_rows import bare_base
from practicum.models.attention import OutputHead
from practicum.models.load_model import load_model, skeleton
from practicum.models.lora import base_fingerprint, has_adapter
from practicum.models.saved_adapter import SavedAdapter
from practicum.places.adapter_teachers import (
    AdapterTeacher,
    base_spec,
    describe_base,
    on_base,
    read_adapters,
)
from practicum.places.vllm_teacher import VllmModel, row_limits, scoring_room
from practicum.recipe.derived import has_own_process
from practicum.recipe.schema.recipe import Model, Recipe
from practicum.recipe.schema.teacher_sections import Teacher


class VllmBase(VllmModel):
    """A base in engines of vLLM and the adapters on it, each once, by their fingerprints."""

    def __init__(
        self,
        teachers: Mapping[str, Teacher],
        adapters: Iterable[SavedAdapter],
        engines: Iterable[VllmEngine],
        folder: TemporaryDirectory[str] | None,
    ) -> None:
        """`folder` has the base, if it was written for vLLM alone; it goes with the engines."""
        self._folder = folder
        first = next(iter(teachers.values()))
        super().__init__(
            f"the base of {', '.join(teachers)}", engines, sleeps=not has_own_process(first.placement)
        )
        self.time = SharedTime(teachers)
        together = sum(teacher.deadline_s for teacher in teachers.values())
        self._deadlines_s = {n: together if self.sleeps else t.deadline_s for n, t in teachers.items()}
        with ExitStack() as undo:
            undo.callback(self.close)
            for name, where in {saved.fingerprint: saved.folder for saved in adapters}.items():
                for engine in self.engines:
                    engine.take_adapter(name, str(where.resolve()))
            undo.pop_all()

    def head(self) -> OutputHead:
        """vLLM does not give it."""
        raise TeacherError(f"{self.name}: vLLM gives no output head; use engine: torch")

    async def score(self, teacher: str, row: ScoreRequest, options: ScoreOptions) -> Scores:
        """Scores of one row of a teacher, by the adapter that the row names; it must be awake."""
        return await self.ask(teacher, row, options, self._deadlines_s[teacher])

    def close(self) -> None:
        """Stop its processes; rows under way fail."""
        super().close()
        if self._folder is not None:
            self._folder.cleanup()


def check_vllm_adapter(name: str, saved: SavedAdapter, base: PreTrainedModel) -> None:
    """A RecipeError if vLLM would not compute a teacher's adapter, or not as it was trained."""
    if (problem := vllm_adapter_problem(saved, base.config.model_type)) is not None:
        advice = f"set teachers.{name}.engine to torch, or its model to the merged model without adapter"
        raise RecipeError(f"teachers.{name}.engine", f"vllm with {problem}", "torch", advice)


def share_vllm_base(
    recipe: Recipe,
    teachers: Mapping[str, Teacher],
    student: PreTrainedModel | None,
    *,
    most: int,
    replicas: int,
) -> dict[str, AdapterTeacher]:
    """These teachers on one base, in `replicas` engines; an adapter of another base is refused before."""
    name, first = next(iter(teachers.items()))
    adapters, spec = read_adapters(teachers), base_spec(recipe, first)
    bare = skeleton(spec)
    for who, saved in adapters.items():
        check_vllm_adapter(who, saved, bare)
    key = "model.path" if first.model is None else f"teachers.{name}.model"
    folder = _check_base(spec, recipe.seed, key, adapters, bare, describe_base(recipe, first), student)
    source = spec.path if folder is None else folder.name
    assert source is not None
    limits = {who: row_limits(teacher, bare.config) for who, teacher in teachers.items()}
    batch_tokens = min(teacher.batch_tokens for teacher in teachers.values())
    longest = max(context for _, context in limits.values())
    room = scoring_room(name, first, longest, batch_tokens, most)
    distinct = {saved.fingerprint: saved for saved in adapters.values()}
    engines = (
        engine_of_folder(source, getattr(torch, spec.dtype), room, wait=False, adapters=[*distinct.values()])
        for _ in range(replicas)
    )
    base = VllmBase(teachers, distinct.values(), engines, folder)
    return on_base(base, adapters, {who: longest for who, (longest, _) in limits.items()})


def _check_base(
    spec: Model,
    seed: int,
    key: str,
    adapters: Mapping[str, SavedAdapter],
    bare: PreTrainedModel,
    about: str,
    student: PreTrainedModel | None,
) -> TemporaryDirectory[str] | None:
    """A RecipeError if an adapter is of another base. Gives a folder with the base, if it has none.

    To compare weights they are loaded here for a moment, unless they are the student's own.
    """
    for saved in adapters.values():
        saved.check_fits(bare, about)
    is_made, is_students = spec.path is None, key == "model.path" and student is not None
    model = student if is_students and student is not None and has_adapter(student) else None
    if model is None and (is_made or any(saved.base is not None for saved in adapters.values())):
        kind = {"device": "cpu"} if is_made else {"device": "cpu", "dtype": "bfloat16"}
        model = load_model(spec.model_copy(update=kind), seed, key=key)
    if model is not None:
        fingerprint = base_fingerprint(model)
        for saved in adapters.values():
            saved.check_base(fingerprint, about)
    if not is_made:
        return None
    assert model is not None
    folder = TemporaryDirectory(prefix="practicum-vllm-")
    bare_base(model).save_pretrained(folder.name)
    return folder
