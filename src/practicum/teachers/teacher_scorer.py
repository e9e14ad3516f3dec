"""A teacher, wherever it is: token sequences in, scores of the response tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from practicum.concurrency.open_time import SharedTime
from practicum.engines.kind import HeldWeights
from practicum.engines.protocol import (
    GenerateRequest,
    Generation,
    ScoreOptions,
    Scorer,
    ScoreRequest,
    Scores,
    Sleeper,
)
from practicum.errors import EngineError, TeacherError
from practicum.processes.dispatch import Dispatcher
from practicum.recipe.schema.teacher_sections import Teacher


class TeacherScorer:
    """A teacher: identical scorers of its model, its adapter on it, and the deadline of a row.

    `sleeper` is what is woken for it, by the name `model`, and `time` measures it: teachers on one base share
    them.
    `held` has the weights of a copy of the student. Without a deadline the scorer itself has one.
    """

    def __init__(
        self,
        name: str,
        spec: Teacher,
        scorers: Sequence[Scorer],
        *,
        deadline_s: float | None,
        sleeper: Sleeper | None = None,
        model: str = "",
        adapter: str | None = None,
        time: SharedTime | None = None,
        held: HeldWeights | None = None,
    ) -> None:
        self.name, self.spec, self.scorers, self.held = name, spec, list(scorers), held
        self.sleeper, self.model, self.adapter = sleeper, model or name, adapter
        self._deadline_s, self._time = deadline_s, time or SharedTime([name])
        self._dispatcher = Dispatcher(self.scorers)

    @property
    def busy_s(self) -> float:
        """Seconds of scoring so far; of teachers on one base, its share by tokens."""
        return self._time.seconds[self.name]

    async def score(self, row: ScoreRequest, options: ScoreOptions) -> Scores:
        """Return the scores of one row; a teacher that sleeps must be awake."""
        context = self.spec.context
        if context is not None and len(row.ids) > context:
            raise TeacherError(
                f"teacher {self.name} can't score {row.name}: {len(row.ids)} tokens, its context is "
                f"{context}; shorten prompts or responses, or raise teachers.{self.name}.context"
            )
        row = replace(row, adapter=self.adapter)
        with self._time.work(self.name, len(row.ids)):
            return await self._dispatcher.run(
                lambda scorer: scorer.score(row, options),
                load=len(row.ids),
                deadline_s=self._deadline_s,
                abort=lambda scorer, why: scorer.abort(why),
                names=(f"teacher {self.name}", row.name, f"teachers.{self.name}.deadline_s"),
            )

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one answer; a teacher that sleeps must be awake."""
        if self.adapter is not None:
            raise TeacherError(f"teacher {self.name} is an adapter, which samples no answers: merge it first")
        about, tokens = f"an answer to prompt {request.counter.prompt}", request.sampling.max_new_tokens
        with self._time.work(self.name, len(request.prompt_ids) + tokens):
            return await self._dispatcher.run(
                lambda scorer: scorer.generate(request),
                load=tokens,
                deadline_s=self._deadline_s,
                abort=lambda scorer, why: scorer.abort(why),
                names=(f"teacher {self.name}", about, f"teachers.{self.name}.deadline_s"),
            )

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Become a copy of the student as these weights are; it must be awake."""
        self.held = self.held or HeldWeights()
        self.held.weights, self.held.version = dict(weights), version
        for scorer in self.scorers:
            try:
                scorer.load_weights(weights.items(), version)
            except EngineError as error:
                # Rows must not be scored by different weights.
                for other in self.scorers:
                    other.abort(str(error))
                raise TeacherError(f"teacher {self.name} can't take weights: {error}") from error

    def close(self) -> None:
        """Stop; open rows fail. Teachers on one base end together."""
        with ExitStack() as stack:
            for scorer in self.scorers:
                stack.callback(scorer.close)
