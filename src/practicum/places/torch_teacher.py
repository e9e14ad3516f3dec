"""Teachers that the torch engine computes: colocated with the student, or in their own processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.models.adapter_rows import put_adapters
from practicum.models.attention import OutputHead
from practicum.models.load_model import context_length, load_model
from practicum.models.lora import copy_on_base, has_adapter
from practicum.models.saved_adapter import SavedAdapter
from practicum.places.model_cache import ColocatedModel
from practicum.places.model_processes import ModelProcesses
from practicum.places.place import UNDECLARED, require_room
from practicum.processes.child_main import ChildRequest, Served
from practicum.recipe.derived import own_options
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.teacher_sections import Teacher


class ColocatedTeacher(ColocatedModel):
    """A teacher in this process, which scores between `wake` and `sleep`; `ModelCache` says when."""

    sleeps = True

    def __init__(self, name: str, teacher: Teacher, model: PreTrainedModel) -> None:
        self.context = score_context(teacher, model)
        # A copy of a student with an adapter is on the student's base.
        owned = not has_adapter(model)
        self.engine = scoring_engine(model, teacher.batch_tokens, self.context, owns_weights=owned)
        super().__init__(name, f"teacher {name}", model, self.engine, owned=owned)

    def head(self) -> OutputHead:
        """Its output head, which stays when it sleeps."""
        return OutputHead.of(self.model)

    async def score(self, row: ScoreRequest, options: ScoreOptions) -> Scores:
        """Scores of one row; it must be awake."""
        require_room(self.name, row, self.context)
        with self.named_errors(row.name):
            return await self.engine.score(row, options)

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace its weights by these; it must be awake."""
        self.engine.load_weights(weights.items(), version)


class OwnTeacher(ModelProcesses):
    """A teacher in `placement.own.replicas` processes: it scores a row while others still roll out.

    Each process loads the model that `model` and `seed` say, and puts the teacher's adapter on it, if any.
    """

    def __init__(self, name: str, teacher: Teacher, *, model: Model | None = None, seed: int = 0) -> None:
        path = f"teachers.{name}"
        source = model or Model(path=teacher.model, dtype=teacher.dtype, device=teacher.device)
        super().__init__(
            f"teacher {name}",
            path,
            partial(_load_served, teacher, source, seed, path),
            own_options(teacher),
            deadline_s=teacher.deadline_s,
        )
        self.name = name

    def head(self) -> OutputHead:
        """A copy of the output head as it is now: to be asked for again after `load_weights`."""
        return self.ask_first("head", "giving its output head")

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights by these in every process."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "weights.safetensors"
            save_file({key: x.contiguous() for key, x in weights.items()}, path)
            self.load_weights(path, version)

    def load_weights(self, path: Path, version: int) -> None:
        """Take the weights of a safetensors file in every process; not while rows are under way.

        If one process can't, all are ended: rows must not be scored by different weights.
        """
        self.ask_all("load", (str(path), version), f"loading weights from {path}")

    async def score(self, row: ScoreRequest, options: ScoreOptions) -> Scores:
        """Scores of one row, the same bits as from an engine in this process."""
        require_room(self.name, row, self.facts().context)
        return await self.ask("score", (row, options), row.name, len(row.ids))


class _ServedTeacher:
    """The child's side of OwnTeacher: scores, its output head, other weights."""

    WORK: ClassVar[frozenset[str]] = frozenset({"score"})

    def __init__(self, engine: TorchEngine, model: PreTrainedModel, adapter: str | None) -> None:
        self._engine, self._model, self.close = engine, model, engine.close
        self._adapter = adapter

    async def answer(self, request: ChildRequest) -> Any:
        """The answer to one of the requests that OwnTeacher sends."""
        if request.what == "score":
            row, options = request.args
            return await self._engine.score(replace(row, adapter=self._adapter), options)
        if request.what == "load":
            path, version = request.args
            return self._engine.load_weights(load_file(path).items(), version)
        return OutputHead.of(self._model)


def _load_served(teacher: Teacher, source: Model, seed: int, path: str) -> tuple[Served, int | None]:
    model = load_model(source, seed, key=f"{path}.model")
    adapter = None
    if teacher.adapter is not None:
        saved = SavedAdapter.read(teacher.adapter, f"{path}.adapter")
        put_adapters(model, {saved.fingerprint: saved}, teacher.model or "the student's base")
        adapter = saved.fingerprint
    context = score_context(teacher, model)
    engine = scoring_engine(model, teacher.batch_tokens, context, owns_weights=True)
    return _ServedTeacher(engine, model, adapter), context


def scoring_engine(
    model: PreTrainedModel, batch_tokens: int, longest: int | None, *, owns_weights: bool
) -> TorchEngine:
    """Scoring needs no KV memory: one slot of two tokens is the least that an engine takes.

    If the model does not declare its longest sequence, `longest` is the limit.
    """
    context = 2 if context_length(model) is not None else longest or UNDECLARED
    return TorchEngine(model, slots=1, context=context, score_tokens=batch_tokens, owns_weights=owns_weights)


def score_context(teacher: Teacher, model: PreTrainedModel) -> int | None:
    """A teacher's longest sequence: the recipe's or the model's, whichever is shorter."""
    return min((n for n in (teacher.context, context_length(model)) if n is not None), default=None)


def load_teacher(name: str, teacher: Teacher, student: PreTrainedModel | None) -> PreTrainedModel:
    """The teacher's model: from its folder, or a copy of the student, which is needed for that only."""
    if teacher.student is not None:
        assert student is not None
        return copied(student)
    assert teacher.model is not None
    spec = Model(path=teacher.model, dtype=teacher.dtype, device=teacher.device)
    return load_model(spec, 0, key=f"teachers.{name}.model")


def copied(student: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of the student, with its own tensors; of one with an adapter, the adapter's alone."""
    return copy_on_base(student).requires_grad_(False).eval()
