"""Teachers that vLLM computes, in their own processes: colocated (asleep until needed) or always awake."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

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
from practicum.places.place import UNDECLARED, require_room
from practicum.recipe.derived import has_own_process, own_options
from practicum.recipe.schema.teacher_sections import Teacher

_SLOTS = 64
"""Sequences that vLLM scores side by side; batch_tokens is what bounds its memory."""


class VllmModel:
    """A frozen model in engines of vLLM, each a process. `sleeps`: it is woken when it is needed."""

    def __init__(self, name: str, engines: Iterable[VllmEngine], *, sleeps: bool) -> None:
        """Engines start side by side; if one can't, none stays behind."""
        self.name, self.sleeps = name, sleeps
        self.engines: list[VllmEngine] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            self.engines.extend(engines)
            for engine in self.engines:
                engine.ready()
            undo.pop_all()
        self._waiting = [0] * len(self.engines)
        self.nbytes = sum(engine.memory().weights for engine in self.engines)
        self.on_cpu = True  # asleep it holds nothing, wherever it computes

    def describe(self) -> list[str]:
        """What was started, in sentences for the log."""
        return [engine.describe() for engine in self.engines]

    async def ask(self, teacher: str, row: ScoreRequest, options: ScoreOptions, deadline_s: float) -> Scores:
        """Scores of a teacher's row, by the engine with the fewest tokens waiting; it must be awake."""
        number = self._waiting.index(min(self._waiting))
        self._waiting[number] += len(row.ids)
        try:
            async with asyncio.timeout(deadline_s):
                return await self.engines[number].score(row, options)
        except TimeoutError:
            raise TeacherError(
                f"teacher {teacher} did not answer for {row.name} within {deadline_s:g} s; if it is "
                f"only slow, raise teachers.{teacher}.deadline_s"
            ) from None
        except EngineError as error:
            raise TeacherError(f"teacher {teacher} failed in {row.name}: {error}") from error
        finally:
            self._waiting[number] -= len(row.ids)

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

    def close(self) -> None:
        """Stop its processes; rows under way fail."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.callback(engine.close)


class VllmTeacher(VllmModel):
    """A place whose rows are scored by vLLM.

    A copy of the student is made of `student`, whose weights it keeps; other teachers are read by vLLM from
    their folder. `most` is the largest top-k that it will be asked for.
    """

    def __init__(
        self, name: str, teacher: Teacher, student: PreTrainedModel | None, *, most: int, replicas: int = 1
    ) -> None:
        self._teacher, self._copies = teacher, teacher.student is not None
        self._deadline_s, self._busy = teacher.deadline_s, OpenTime()
        self._version, self._weights = 0, _copied(student) if self._copies else {}
        self.context, context = row_limits(teacher, _config(teacher, student))
        room = scoring_room(name, teacher, context, teacher.batch_tokens, most)
        engines = (self._engine(room, student) for _ in range(replicas))
        super().__init__(name, engines, sleeps=not has_own_process(teacher.placement))
        if self._copies:
            with ExitStack() as undo:
                undo.callback(self.close)
                self.take(self._weights, 0)
                undo.pop_all()

    @property
    def busy_s(self) -> float:
        """Seconds in which rows were under way."""
        return self._busy.seconds

    async def score(self, row: ScoreRequest, options: ScoreOptions) -> Scores:
        """Scores of one row; it must be awake."""
        require_room(self.name, row, self.context)
        with self._busy.work():
            return await self.ask(self.name, row, options, self._deadline_s)

    def head(self) -> OutputHead:
        """vLLM does not give it."""
        raise TeacherError(f"teacher {self.name}: vLLM gives no output head; use engine: torch")

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace its weights by these; it must be awake."""
        self._weights, self._version = dict(weights), version
        for engine in self.engines:
            engine.load_weights(*self._held())

    def _held(self) -> tuple[Weights, int]:
        return self._weights.items(), self._version

    def _engine(self, room: EngineSize, student: PreTrainedModel | None) -> VllmEngine:
        if self._copies:
            assert student is not None
            return engine_of_model(student, room, self._held, wait=False)
        assert self._teacher.model is not None
        return engine_of_folder(self._teacher.model, getattr(torch, self._teacher.dtype), room, wait=False)


def scoring_room(name: str, teacher: Teacher, context: int, batch_tokens: int, most: int) -> EngineSize:
    """What an engine must have room for that scores with a top-k of at most `most`.

    It has this process's threads, if it works while this one waits.
    """
    own = has_own_process(teacher.placement)
    threads = own_options(teacher).threads if own else torch.get_num_threads()
    sizes = context, _SLOTS, max(context, batch_tokens), max(1, most)
    return EngineSize(
        f"teachers.{name}", teacher.vllm, threads, *sizes, samples=False, batch_tokens=batch_tokens
    )


def row_limits(teacher: Teacher, config: Any) -> tuple[int, int]:
    """Longest row, and the engine's context: it has one token more, because vLLM always samples one."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    limit = teacher.context or min(longest or UNDECLARED, UNDECLARED)
    context = limit + 1 if longest is None else min(limit + 1, longest)
    return context - 1, context


def _copied(student: PreTrainedModel | None) -> dict[str, Tensor]:
    assert student is not None
    return {name: tensor.detach().cpu().clone() for name, tensor in student.named_parameters()}


def _config(teacher: Teacher, student: PreTrainedModel | None) -> Any:
    if teacher.student is not None:
        assert student is not None
        return student.config
    assert teacher.model is not None
    return read_config(teacher.model)
