"""Teachers that are adapters: those on one base share it, in memory and in the batches of one engine.

On the student's base they cost their adapters alone, and nothing sleeps or wakes. A student that trains all
of its weights leaves its base: then the base is loaded once more, frozen, for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Protocol

from transformers import PreTrainedModel

from practicum.concurrency.open_time import SharedTime
from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.errors import EngineError, TeacherError
from practicum.models.adapter_rows import bare_base, put_adapters
from practicum.models.attention import OutputHead
from practicum.models.load_model import load_model
from practicum.models.lora import has_adapter
from practicum.models.saved_adapter import SavedAdapter
from practicum.places.model_cache import ColocatedModel
from practicum.places.place import require_room
from practicum.places.torch_teacher import score_context, scoring_engine
from practicum.recipe.schema.recipe import Model, Recipe
from practicum.recipe.schema.teacher_sections import Teacher


def base_spec(recipe: Recipe, teacher: Teacher) -> Model:
    """The model that a teacher's adapter is on, as it is loaded: its own, or the student's start."""
    if teacher.model is None:
        return recipe.model.model_copy(update={"lora": None})
    return Model(path=teacher.model, dtype=teacher.dtype, device=teacher.device)


def describe_base(recipe: Recipe, teacher: Teacher) -> str:
    """The base of a teacher's adapter, in a phrase."""
    return teacher.model or f"the student's base, {recipe.model.path or 'a made model'}"


class AdapterBase(Protocol):
    """A model that several teachers are on. `sleeps`: it is woken for them; `time` is theirs."""

    name: str
    time: SharedTime

    @property
    def sleeps(self) -> bool: ...

    def head(self) -> OutputHead:
        """The output head of all its teachers."""
        ...

    async def score(self, teacher: str, row: ScoreRequest, options: ScoreOptions) -> Scores:
        """Scores of one row of a teacher, by the adapter that the row names."""
        ...

    def close(self) -> None:
        """Stop; rows under way fail."""
        ...


class SharedBase(ColocatedModel):
    """A frozen model and the adapters on it, each once. `owned`: nobody else uses the model's weights."""

    def __init__(
        self,
        model: PreTrainedModel,
        teachers: Mapping[str, Teacher],
        adapters: Mapping[str, SavedAdapter],
        *,
        about: str,
        owned: bool,
    ) -> None:
        """`adapters` are those of the teachers that have one; `about` says in errors what the model is."""
        distinct = {saved.fingerprint: saved for saved in adapters.values()}
        put_adapters(model, distinct, about)
        limits = [score_context(teacher, model) for teacher in teachers.values()]
        longest = None if None in limits else max(limit for limit in limits if limit is not None)
        batch_tokens = min(teacher.batch_tokens for teacher in teachers.values())
        self.engine = scoring_engine(model, batch_tokens, longest, owns_weights=owned)
        who = f"the base of {', '.join(teachers)}"
        super().__init__(who, who, model, self.engine, owned=owned)
        self.time, self.sleeps = SharedTime(teachers), owned

    def head(self) -> OutputHead:
        """Its output head, which all its teachers have; a copy only if it may be offloaded."""
        return self._head

    @cached_property
    def _head(self) -> OutputHead:
        return OutputHead.of(self.model, copy=self.owned)

    async def score(self, teacher: str, row: ScoreRequest, options: ScoreOptions) -> Scores:
        """Scores of one row; a base that sleeps must be awake."""
        try:
            return await self.engine.score(row, options)
        except EngineError as error:
            raise TeacherError(f"teacher {teacher} failed in {row.name}: {error}") from error


class AdapterTeacher:
    """A teacher on a shared base, with an adapter or (`adapter` None) the base itself."""

    def __init__(self, name: str, base: AdapterBase, adapter: str | None, context: int | None) -> None:
        self.name, self.base, self.adapter, self.context = name, base, adapter, context

    @property
    def busy_s(self) -> float:
        """Its share of the seconds of scoring so far, by tokens."""
        return self.base.time.seconds[self.name]

    def head(self) -> OutputHead:
        """The base's output head."""
        return self.base.head()

    async def score(self, row: ScoreRequest, options: ScoreOptions) -> Scores:
        """Scores of one row; a base that sleeps must be awake."""
        require_room(self.name, row, self.context)
        with self.base.time.work(self.name, len(row.ids)):
            return await self.base.score(self.name, replace(row, adapter=self.adapter), options)

    def close(self) -> None:
        """Stop the engine that it shares; rows under way fail."""
        self.base.close()


def read_adapters(teachers: Mapping[str, Teacher]) -> dict[str, SavedAdapter]:
    """The adapters of those that have one."""
    return {
        name: SavedAdapter.read(teacher.adapter, f"teachers.{name}.adapter")
        for name, teacher in teachers.items()
        if teacher.adapter is not None
    }


def share_base(
    recipe: Recipe, teachers: Mapping[str, Teacher], student: PreTrainedModel | None
) -> dict[str, AdapterTeacher]:
    """These teachers on one base, which is the student's own in memory if it stays as it is."""
    first_name, first = next(iter(teachers.items()))
    adapters = read_adapters(teachers)
    lent = student if first.model is None and student is not None and has_adapter(student) else None
    if lent is not None:
        model = bare_base(lent)
    else:
        key = "model.path" if first.model is None else f"teachers.{first_name}.model"
        model = load_model(base_spec(recipe, first), recipe.seed, key=key)
    about = describe_base(recipe, first)
    base = SharedBase(model, teachers, adapters, about=about, owned=lent is None)
    return on_base(base, adapters, {name: score_context(t, model) for name, t in teachers.items()})


def on_base(
    base: AdapterBase, adapters: Mapping[str, SavedAdapter], contexts: Mapping[str, int | None]
) -> dict[str, AdapterTeacher]:
    """Teachers on a base, with their longest rows; each by the fingerprint of its adapter, if it has one."""
    names = {name: saved.fingerprint for name, saved in adapters.items()}
    return {name: AdapterTeacher(name, base, names.get(name), most) for name, most in contexts.items()}
