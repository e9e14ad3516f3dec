"""Teachers that vLLM computes, in their own processes: colocated (asleep until needed) or always awake."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.concurrency.open_time import OpenTime
from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.engines.vllm.make_vllm import EngineSize, engine_of_folder, engine_of_model
from practicum.engines.vllm.vllm_engine import VllmEngine, Weights
from practicum.errors import EngineError, TeacherError
from practicum.models.attention import OutputHead
from practicum.models.model_files import read_config
from practicum.models.offloaded_weights import OffloadTarget
from practicum.places.place import UNDECLARED, too_long
from practicum.recipe.derived import has_own_process, own_options
from practicum.recipe.schema.teacher_sections import Teacher

_SLOTS = 64
"""Sequences that vLLM scores side by side; batch_tokens is what bounds its memory."""


class VllmTeacher:
    """A place whose rows are scored by vLLM; each row by the engine with the fewest tokens waiting.

    A copy of the student is made of `student`, whose weights it keeps; other teachers are read by vLLM from
    their folder. `most` is the largest top-k that it will be asked for.
    """

    def __init__(
        self, name: str, teacher: Teacher, student: PreTrainedModel | None, *, most: int, replicas: int = 1
    ) -> None:
        self.name, self.sleeps = name, not has_own_process(teacher.placement)
        self._teacher, self._copies = teacher, teacher.student is not None
        self._deadline_s, self._busy = teacher.deadline_s, OpenTime()
        self._version, self._weights = 0, _copied(student) if self._copies else {}
        limit, context = _limits(teacher, student)
        self.context = limit
        batch = teacher.batch_tokens
        room = EngineSize(
            context, _SLOTS, max(context, batch), max(1, most), samples=False, batch_tokens=batch
        )
        self._waiting = [0] * replicas
        self.engines: list[VllmEngine] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(replicas):
                self.engines.append(self._engine(room, student))
            for engine in self.engines:
                engine.ready()
                if self._copies:
                    engine.load_weights(*self._held())
            undo.pop_all()
        self.nbytes = sum(engine.memory().weights for engine in self.engines)
        self.on_cpu = True  # asleep it holds nothing, wherever it computes

    @property
    def busy_s(self) -> float:
        """Seconds in which rows were under way."""
        return self._busy.seconds

    def describe(self) -> list[str]:
        """What was started, in sentences for the log."""
        return [engine.describe() for engine in self.engines]

    async def score(self, row: ScoreRequest, options: ScoreOptions) -> Scores:
        """Scores of one row; it must be awake."""
        if len(row.ids) > self.context:
            raise TeacherError(too_long(self.name, row, self.context))
        number = self._waiting.index(min(self._waiting))
        self._waiting[number] += len(row.ids)
        try:
            with self._busy.work():
                async with asyncio.timeout(self._deadline_s):
                    return await self.engines[number].score(row, options)
        except TimeoutError:
            raise TeacherError(
                f"teacher {self.name} did not answer for {row.name} within {self._deadline_s:g} s; if it is "
                f"only slow, raise teachers.{self.name}.deadline_s"
            ) from None
        except EngineError as error:
            raise TeacherError(f"teacher {self.name} failed in {row.name}: {error}") from error
        finally:
            self._waiting[number] -= len(row.ids)

    def head(self) -> OutputHead:
        """vLLM does not give it."""
        raise TeacherError(f"teacher {self.name}: vLLM gives no output head; use engine: torch")

    def wake(self) -> None:
        """Bring the weights back."""
        for engine in self.engines:
            engine.wake()

    def sleep(self) -> None:
        """Give weights and KV memory back."""
        for engine in self.engines:
            engine.sleep()

    def offload(self, where: OffloadTarget) -> None:
        """Nothing to move: asleep it holds no memory."""

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace its weights by these; it must be awake."""
        self._weights, self._version = dict(weights), version
        for engine in self.engines:
            engine.load_weights(*self._held())

    def close(self) -> None:
        """Stop its processes; rows under way fail."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.callback(engine.close)

    def _held(self) -> tuple[Weights, int]:
        return self._weights.items(), self._version

    def _engine(self, room: EngineSize, student: PreTrainedModel | None) -> VllmEngine:
        teacher, key = self._teacher, f"teachers.{self.name}"
        threads = torch.get_num_threads() if self.sleeps else own_options(teacher).threads
        if self._copies:
            assert student is not None
            return engine_of_model(key, student, teacher.vllm, room, self._held, threads=threads, wait=False)
        assert teacher.model is not None
        dtype = getattr(torch, teacher.dtype)
        return engine_of_folder(key, teacher.model, dtype, teacher.vllm, room, threads=threads, wait=False)


def _copied(student: PreTrainedModel | None) -> dict[str, Tensor]:
    assert student is not None
    return {name: tensor.detach().cpu().clone() for name, tensor in student.named_parameters()}


def _limits(teacher: Teacher, student: PreTrainedModel | None) -> tuple[int, int]:
    """Longest row, and the engine's context: it has one token more, because vLLM always samples one."""
    if teacher.student is not None:
        assert student is not None
        config = student.config
    else:
        assert teacher.model is not None
        config = read_config(teacher.model)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    limit = teacher.context or min(longest or UNDECLARED, UNDECLARED)
    context = limit + 1 if longest is None else min(limit + 1, longest)
    return context - 1, context
