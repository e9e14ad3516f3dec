"""A teacher in any placement: token sequences in, scores of the response tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from practicum.concurrency.busy_time import SharedBusyTime
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
    """A teacher: identical scorers of its model, its adapter, and the deadline of a row.

    `sleeper` wakes the model named `model`, and `time` measures its use. Teachers on one base share both.
    `held` has the weights of a copy of the student. Without a deadline, the scorer's applies.
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
        time: SharedBusyTime | None = None,
        held: HeldWeights | None = None,
    ) -> None:
        self.name, self.spec, self.scorers, self.held = name, spec, list(scorers), held
        self.sleeper, self.model, self.adapter = sleeper, model or name, adapter
        self._deadline_s, self._time = deadline_s, time or SharedBusyTime([name])
        self._dispatcher = Dispatcher(self.scorers)

    @property
    def busy_s(self) -> float:
        """Seconds of scoring so far. Teachers on one base share the time by tokens."""
        return self._time.seconds[self.name]

    async def score(self, row: ScoreRequest, options: ScoreOptions) -> Scores:
        """Return the scores of a row. A sleeping teacher must be awake."""
        context = self.spec.context
        if context is not None and len(row.ids) > context:
            raise TeacherError(
                f"teacher {self.name} can't score {row.name}: {len(row.ids)} tokens exceed its context of "
                f"{context}. Shorten prompts or responses, or raise teachers.{self.name}.context"
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
        """Sample a response. A sleeping teacher must be awake."""
        if self.adapter is not None:
            raise TeacherError(
                f"teacher {self.name} is an adapter and can't sample responses: merge it first"
            )
        about, tokens = f"a response to prompt {request.counter.prompt}", request.sampling.max_new_tokens
        with self._time.work(self.name, len(request.prompt_ids) + tokens):
            return await self._dispatcher.run(
                lambda scorer: scorer.generate(request),
                load=tokens,
                deadline_s=self._deadline_s,
                abort=lambda scorer, why: scorer.abort(why),
                names=(f"teacher {self.name}", about, f"teachers.{self.name}.deadline_s"),
            )

    def take(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load these weights of the student into its copy, which must be awake."""
        self.held = self.held or HeldWeights()
        self.held.weights, self.held.version = dict(weights), version
        for scorer in self.scorers:
            try:
                scorer.load_weights(weights.items(), version)
            except EngineError as error:
                # All rows must be scored by the same weights.
                for other in self.scorers:
                    other.abort(str(error))
                raise TeacherError(f"teacher {self.name} can't take weights: {error}") from error

    def close(self) -> None:
        """Stop. Rows in flight fail. Teachers on one base stop together."""
        with ExitStack() as stack:
            for scorer in self.scorers:
                stack.callback(scorer.close)
