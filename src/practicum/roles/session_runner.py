"""Sessions on an engine: attempts at prompts become rows, and rows go into the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.plan import Plan
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.store import Store
from practicum.engines.protocol import Engine, Sampling
from practicum.errors import PracticumError
from practicum.models.vision import sequence_positions
from practicum.recipe.derived import session_deadline
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.stage_table import VISION_FIELDS
from practicum.sessions.attempts import Attempt, AttemptResult, run_attempt
from practicum.sessions.loops import find_loop
from practicum.sessions.policies import DemonstratorPolicy, EnginePolicy, Policy, make_demonstrator
from practicum.sessions.prompt_encoder import Encoder
from practicum.sessions.session import Session, SessionStart
from practicum.sessions.tools.toolbox import Toolbox
from practicum.sessions.trajectory import Trajectory
from practicum.tasks.prompts import Prompt
from practicum.tasks.rewards import RewardFunctions, RewardSample


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A row to be written; a failed session has no trajectory and leaves a row without fields."""

    key: Key
    tags: Tags
    trajectory: Trajectory | None


class SessionRunner:
    """Runs sessions of one plan: an engine answers, or a demonstrator does."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        store: Store,
        engine: Engine,
        encoder: Encoder,
        functions: RewardFunctions,
        toolbox: Toolbox,
        *,
        context: int,
        config: Any,
        teacher_of: Callable[[Prompt], str] | None = None,
    ) -> None:
        """`teacher_of` names the teacher of a prompt, if there are teachers."""
        self.recipe, self.plan, self.store = recipe, plan, store
        self.encoder, self.functions, self.toolbox = encoder, functions, toolbox
        self.tokenizer = encoder.tokenizer
        self.context, self.config, self.teacher_of = context, config, teacher_of
        self.loop = find_loop(recipe.agent.loop)
        self._policy = EnginePolicy(engine, keep=recipe.agent.loop != "single_turn")
        assert isinstance(self.tokenizer.eos_token_id, int)
        self.end_id = self.tokenizer.eos_token_id

    def start(self, prompt: Prompt) -> SessionStart:
        """The prompt as the model gets it."""
        encoded = self.encoder(prompt)
        return SessionStart(encoded.ids, encoded.images, encoded.messages, self.encoder.tools)

    async def run(self, attempt: Attempt, start: SessionStart, seed: int) -> list[SessionRow]:
        """The rows of one session; of a failed one, a row that says why."""
        ended = await self._attempt(attempt, start, self._policy, seed)
        if ended.result is None:
            return [_failed(attempt, ended)]
        return self._rows(attempt, ended)

    async def demonstrate(self, prompt: Prompt) -> list[SessionRow]:
        """What a demonstrator does with a prompt in the agent's loop: rows for supervised training."""
        sampling = Sampling(max_new_tokens=self.context, stop=frozenset({self.end_id}))
        policy = DemonstratorPolicy(make_demonstrator(self.recipe.agent, self.toolbox), self.tokenizer)
        attempt = Attempt(prompt, 0, sampling)
        ended = await self._attempt(attempt, self.start(prompt), policy, 0)
        if ended.result is None:
            error = PracticumError(f"{prompt} can't be demonstrated: {ended.failure}")
            error.details = ended.trace or ""
            raise error
        return self._rows(attempt, ended)

    def put(self, partition: str, rows: Sequence[SessionRow], fields: Sequence[str]) -> BatchRef:
        """Write rows with these fields, in one put, and failed ones without."""
        done = [row for row in rows if row.trajectory is not None]
        failed = [row for row in rows if row.trajectory is None]
        if failed:
            self.store.put(_batch(partition, failed), {})
        if done:
            self.store.put(_batch(partition, done), self._columns(done, fields))
        return _batch(partition, rows)

    async def _attempt(
        self, attempt: Attempt, start: SessionStart, policy: Policy, seed: int
    ) -> AttemptResult:
        def make(number: int) -> Session:
            return Session(
                attempt.prompt,
                start,
                attempt.session,
                policy,
                attempt.sampling,
                self.tokenizer,
                context=self.context,
                agent=self.recipe.agent,
                toolbox=self.toolbox,
                check=self._checker(attempt.prompt),
                seed=seed,
                attempt=number,
            )

        return await run_attempt(self.loop, self.recipe.agent, make, session_deadline(self.recipe))

    def _checker(self, prompt: Prompt) -> Callable[[str], float]:
        """Scores a text by the task's own checker, for loops that ask."""

        def check(text: str) -> float:
            known = (prompt.answer, prompt.row, prompt.task, prompt.domain)
            return self.functions.check(
                RewardSample("", text, *known, finish="", key=str(prompt), response_tokens=0)
            )

        return check

    def _rows(self, attempt: Attempt, ended: AttemptResult) -> list[SessionRow]:
        assert ended.result is not None
        found = zip(ended.result.trajectories, ended.result.row_rewards(), strict=True)
        return [
            SessionRow(Key(attempt.prompt.uid, attempt.session, i), self._tags(attempt, ended, t, reward), t)
            for i, (t, reward) in enumerate(found)
        ]

    def _tags(
        self, attempt: Attempt, ended: AttemptResult, trajectory: Trajectory, reward: float | None
    ) -> Tags:
        prompt, pieces = attempt.prompt, trajectory.pieces
        return Tags(
            prompt_tokens=len(trajectory.prompt_ids),
            response_tokens=sum(len(piece.ids) for piece in pieces),
            sampled_tokens=sum(len(piece.ids) for piece in pieces if piece.sampled),
            version_min=trajectory.version_min or 0,
            version_max=trajectory.version_max,
            domain=prompt.domain,
            task=prompt.task,
            teacher=None if self.teacher_of is None else self.teacher_of(prompt),
            finish=trajectory.finish,
            turns=trajectory.turns,
            tool_calls=trajectory.tool_calls,
            tool_errors=trajectory.tool_errors,
            breaks=trajectory.breaks,
            retries=ended.retries,
            trace=trajectory.trace,
            given_reward=reward,
            is_baseline=attempt.is_baseline,
        )

    def _columns(self, rows: Sequence[SessionRow], fields: Sequence[str]) -> dict[str, Column]:
        trajectories = [row.trajectory for row in rows if row.trajectory is not None]
        columns = [trajectory.columns() for trajectory in trajectories]
        put: dict[str, Column] = {
            f: Ragged.from_rows([c[f] for c in columns]) for f in fields if f not in VISION_FIELDS
        }
        if set(VISION_FIELDS) <= set(fields):
            pictures = [t.images for t in trajectories]
            put["multi_modal_inputs"] = [{} if one is None else one.as_inputs() for one in pictures]
            places = [sequence_positions(self.config, t.ids(), t.images) for t in trajectories]
            put["position_ids"] = Ragged.from_rows(places)
        return put


def _failed(attempt: Attempt, ended: AttemptResult) -> SessionRow:
    """A failed session is a row without fields: seen and counted, never trained on."""
    prompt = attempt.prompt
    tags = Tags(
        status="failed",
        failure=ended.failure,
        trace=ended.trace,
        domain=prompt.domain,
        task=prompt.task,
        retries=ended.retries,
        is_baseline=attempt.is_baseline,
    )
    return SessionRow(Key(prompt.uid, attempt.session), tags, None)


def _batch(partition: str, rows: Sequence[SessionRow]) -> BatchRef:
    return BatchRef(partition, tuple(row.key for row in rows), tuple(row.tags for row in rows))
