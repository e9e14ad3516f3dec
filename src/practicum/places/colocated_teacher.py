"""Teachers in the student's process and on its device: asleep until the rollout is done."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from practicum.engines.protocol import Scores
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError, TeacherError
from practicum.models.load_model import context_length, load_model
from practicum.models.offloaded_weights import OffloadTarget, distinct_tensors
from practicum.models.output_head import OutputHead
from practicum.places.place import UNDECLARED, ScoreOptions, ScoreRow, too_long
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.teacher_sections import Teacher


class ColocatedTeacher:
    """A model that scores between `wake` and `sleep`; `Residency` says when."""

    sleeps = True

    def __init__(self, name: str, teacher: Teacher, model: PreTrainedModel) -> None:
        self.name, self.busy_s, self._woken = name, 0.0, time.perf_counter()
        self.model = model
        self.nbytes = sum(tensor.nbytes for tensor in distinct_tensors(model))
        self.on_cpu = model.device.type == "cpu"
        longest = context_length(model)
        self.context = min((n for n in (teacher.context, longest) if n is not None), default=None)
        # Scoring needs no KV memory: one slot of two tokens is what the engine can't do without. Of a model
        # that does not say how long sequences may be, the engine's context is the limit.
        context = 2 if longest is not None else teacher.context or UNDECLARED
        self.engine = TorchEngine(
            model, slots=1, context=context, score_tokens=teacher.batch_tokens, owns_weights=True
        )

    def head(self) -> OutputHead:
        """Its output head, which stays when it sleeps."""
        return OutputHead.of(self.model)

    async def score(self, row: ScoreRow, wanted: ScoreOptions) -> Scores:
        """What it says of a row; it must be awake."""
        if self.context is not None and len(row.ids) > self.context:
            raise TeacherError(too_long(self.name, row, self.context))
        try:
            return await self.engine.score(
                row.ids,
                row.start,
                wanted.top_k,
                temperature=wanted.temperature,
                hidden=wanted.hidden,
                vocab=wanted.vocab,
                images=row.images,
            )
        except EngineError as error:
            raise TeacherError(f"teacher {self.name} failed in {row.name}: {error}") from error

    def wake(self) -> None:
        """Bring the weights back to the device."""
        self._woken = time.perf_counter()
        self.engine.wake()

    def sleep(self) -> None:
        """Rest; the weights stay where they are until `put_aside`."""
        self.engine.sleep()
        self.busy_s += time.perf_counter() - self._woken

    def put_aside(self, where: OffloadTarget) -> None:
        """Move a sleeping teacher's weights to the host's memory or to disk."""
        self.engine.put_aside(where)

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Become what these weights are; it must be awake."""
        self.engine.load_weights(weights.items(), version)

    def close(self) -> None:
        """Stop."""
        self.engine.close()


def load_teacher(name: str, teacher: Teacher, student: PreTrainedModel | None) -> PreTrainedModel:
    """The teacher's model: from its folder, or a copy of the student, which is needed for that only."""
    if teacher.student is not None:
        assert student is not None
        return copied(student)
    assert teacher.model is not None
    spec = Model(path=teacher.model, dtype=teacher.dtype, device=teacher.device)
    return load_model(spec, 0, key=f"teachers.{name}.model")


def copied(student: PreTrainedModel) -> PreTrainedModel:
    """The student's weights in tensors of their own, not to be trained."""
    model = copy.deepcopy(student)
    for parameter in model.parameters():
        assert isinstance(parameter, nn.Parameter)
        parameter.requires_grad_(False)
    return model.eval()
