"""The rollout role: sessions are run, and finished ones are scored at once where that is possible.

What is the same in every runtime is here: how a session on an engine becomes rows (`SessionRunner`), which
sessions are scored at once, what is remembered of them, and the rewards that are left for the end. Where
sessions run and are scored is the runtime's (`SessionWorkers`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.concurrency.open_time import HiddenShare
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.engines.protocol import Engine, Sampling
from practicum.errors import PracticumError, SessionError
from practicum.models.vision import sequence_positions
from practicum.recipe.derived import lag, scores_during_rollout, session_deadline, waits_for_models
from practicum.recipe.schema.recipe import Recipe
from practicum.records.recording_store import record_more
from practicum.roles.reward import SessionName, rewards_at_once
from practicum.roles.stage_table import VISION_FIELDS
from practicum.roles.teachers import prompts_read
from practicum.sessions.attempts import Attempt, AttemptResult, find_loop, run_attempt
from practicum.sessions.demonstrator import DemonstratorPolicy, make_demonstrator
from practicum.sessions.session import EnginePolicy, Policy, Session, SessionStart, Trajectory
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.prompts import Encoder, Prompt
from practicum.tasks.rewards import RewardFunctions, RewardSample

Finished = Callable[[BatchRef], Coroutine[Any, Any, None] | None]
"""Takes the rows of finished sessions; gives the work of scoring them, if they are scored at once."""


class SessionWorkers(Protocol):
    """Where sessions run and are scored: in this process, or by replicas on a cluster."""

    async def run(
        self,
        attempts: Sequence[Attempt],
        partition: str,
        seed: int,
        *,
        at_once: Callable[[Prompt], bool],
        finished: Finished,
    ) -> list[Key]:
        """Run sessions and write their rows, failed ones too; gives their keys.

        `finished` gets the rows of sessions that are written, and the work that it gives is done before this
        ends: of prompts for which `at_once` is true it gets each session as soon as it is done.
        """
        ...

    async def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        """Write what a demonstrator does with each prompt, in the prompts' order."""
        ...

    async def reward_session(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        """Score one finished session and write its reward."""
        ...

    def reward(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        """Score sessions after the rollout and write their rewards."""
        ...

    async def teach(self, teacher: str, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        """Have a session scored by a teacher with its own resources."""
        ...

    def engines_asleep(self) -> AbstractContextManager[None]:
        """The student's engines free their memory inside."""
        ...

    def named_blocks(self) -> AbstractContextManager[None]:
        """A DeadlineError from inside names the function that blocks the event loop of another process."""
        ...


class RolloutRole:
    """Rolls out and scores sessions: one for training, one for evaluation."""

    def __init__(self, recipe: Recipe, plan: Plan, store: Store, workers: SessionWorkers) -> None:
        self.recipe, self.plan, self.store, self.workers = recipe, plan, store, workers
        self.prompts: dict[Key, Prompt] = {}
        """The prompt of each row, as long as the row is in the store."""
        self.hidden = HiddenShare()
        self._functions = RewardFunctions(recipe.tasks, recipe.reward)
        teachers = recipe.teachers.items() if "teachers" in plan else ()
        self._own_teachers = {name for name, teacher in teachers if scores_during_rollout(teacher)}
        self._open: dict[SessionName, Prompt] = {}
        """Sessions of the rollout under way that are not done yet."""
        self._done: set[Key] = set()
        """Rows of sessions that are done: run, and scored by those who score at once."""
        self._kept: set[Key] = set()
        """Those of them that a checkpoint had, until their step is sampled again."""
        self._rewarded: set[SessionName] = set()
        """Sessions that have their reward."""

    def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        """Write what a demonstrator does with each prompt: rows for supervised training."""
        work, deadline_s = self.workers.demonstrate(prompts, partition), self.recipe.rollout.deadline_s
        batch = run_async(work, timeout=deadline_s, owner="demonstrations")
        self._remember(batch.keys, {prompt.uid: prompt for prompt in prompts})
        return batch

    def rollout(self, attempts: Sequence[Attempt], partition: str, *, seed: int) -> BatchRef:
        """Run sessions side by side and write their rows; the batch is in the order of its keys.

        Sessions that were done before a checkpoint are not run again: their rows are in the store.
        """
        prompts = {attempt.prompt.uid: attempt.prompt for attempt in attempts}
        kept = [key for key in self._kept if key.prompt in prompts]
        self._kept.difference_update(kept)
        self._remember(kept, prompts)
        ran = {key[:2] for key in kept}
        attempts = [a for a in attempts if (a.prompt.uid, a.session) not in ran]
        self._open = {(a.prompt.uid, a.session): a.prompt for a in attempts}
        self._rewarded -= self._open.keys()
        keys = self._run(attempts, prompts, partition, seed) if attempts else []
        # Sessions finish in any order; the batch is in the order of its keys.
        return self.store.batch(partition, sorted([*kept, *keys]))

    def _run(
        self, attempts: Sequence[Attempt], prompts: Mapping[int, Prompt], partition: str, seed: int
    ) -> list[Key]:
        def finished(rows: BatchRef) -> Coroutine[Any, Any, None] | None:
            self.hidden.session_ended()
            self._remember(rows.keys, prompts)
            if (scoring := self._scoring(rows)) is None:
                self._note_done(rows)
                return None
            return self._score(rows, scoring)

        work = self.workers.run(attempts, partition, seed, at_once=self._scores_at_once, finished=finished)
        with self.hidden.rollout(), self.workers.named_blocks():
            return run_async(work, timeout=self.recipe.rollout.deadline_s, owner=f"rollout ({partition})")

    def reward(self, batch: BatchRef) -> None:
        """Score the sessions that were not scored during the rollout."""
        left = batch.where(lambda key, _: key[:2] not in self._rewarded)
        if left:
            with self.engines_asleep() if waits_for_models(self.recipe) else nullcontext():
                self.workers.reward(left, {key: self.prompts[key] for key in left.keys})
        self._rewarded.update(key[:2] for key in left.keys)

    def engines_asleep(self) -> AbstractContextManager[None]:
        """The student's engines free their memory for others; not with a lag, where they are at work."""
        return nullcontext() if lag(self.recipe) else self.workers.engines_asleep()

    def open_groups(self) -> list[tuple[Prompt, int]]:
        """The groups of the rollout under way that are not done, each with how many sessions are not."""
        left: dict[int, tuple[Prompt, int]] = {}
        for prompt in list(self._open.values()):
            left[prompt.uid] = prompt, left.get(prompt.uid, (prompt, 0))[1] + 1
        return list(left.values())

    def done_rows(self) -> tuple[list[Key], list[SessionName]]:
        """Rows of sessions that are done, and sessions that have their reward: for a checkpoint."""
        rewarded = sorted(self._rewarded.copy())
        return sorted(self._done.copy()), rewarded

    def restore(self, done: Iterable[Key], rewarded: Iterable[SessionName]) -> None:
        """Take up what `done_rows` gave, of rows that are in the store again."""
        self._done, self._kept, self._rewarded = set(done), set(done), set(rewarded)

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop what is remembered of rows that leave the store."""
        for key in keys:
            self.prompts.pop(key, None)
            self._done.discard(key)
            self._rewarded.discard(key[:2])

    def _remember(self, keys: Iterable[Key], prompts: Mapping[int, Prompt]) -> None:
        self.prompts.update((key, prompts[key.prompt]) for key in keys)

    def _note_done(self, rows: BatchRef) -> None:
        self._done.update(rows.keys)
        for key in rows.keys:
            self._open.pop(key[:2], None)

    def _scores_at_once(self, prompt: Prompt) -> bool:
        """Whether single sessions of this prompt are scored while others still roll out."""
        return bool(self._own_teachers) or self._rewards_at_once(prompt.task)

    def _rewards_at_once(self, task: str) -> bool:
        return rewards_at_once(self.recipe, self.plan, self._functions, task)

    def _scoring(self, rows: BatchRef) -> tuple[BatchRef, BatchRef] | None:
        """Those of these finished rows that are rewarded and that are taught at once, if there are any."""
        rows = rows.where(lambda _, tags: tags.status == "ready")
        rewarded = rows.where(lambda _, tags: tags.given_reward is None and self._rewards_at_once(tags.task))
        taught = rows.where(lambda _, tags: tags.teacher in self._own_teachers and not tags.is_baseline)
        return (rewarded, taught) if rewarded or taught else None

    async def _score(self, rows: BatchRef, scoring: tuple[BatchRef, BatchRef]) -> None:
        rewarded, taught = scoring
        by_models = bool(taught) or bool(self.recipe.reward.models)
        with self.hidden.scoring() if by_models else nullcontext():
            works = [self._reward_session(rewarded)] if rewarded else []
            works += [self._teach_session(taught)] if taught else []
            await gather_all(works)
        self._note_done(rows)

    async def _reward_session(self, batch: BatchRef) -> None:
        prompts = {key: self.prompts[key] for key in batch.keys}
        await self.workers.reward_session(batch, prompts)
        self._rewarded.add(batch.keys[0][:2])

    async def _teach_session(self, batch: BatchRef) -> None:
        teacher = batch.tags[0].teacher
        assert teacher is not None
        await self.workers.teach(teacher, batch, prompts_read(self.recipe, batch, self.prompts))


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
        self.vocab: int = config.get_text_config().vocab_size
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
            batch = _batch(partition, done)
            self.store.put(batch, self._columns(done, fields))
            if any(tags.version_min != tags.version_max for tags in batch.tags):
                versions = [row.trajectory.versions() for row in done if row.trajectory is not None]
                record_more(self.store, "rollout", batch, {"version": versions})
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
                vocab=self.vocab,
            )

        return await run_attempt(self.loop, self.recipe.agent, make, session_deadline(self.recipe))

    def _checker(self, prompt: Prompt) -> Callable[[str], float]:
        """Scores a text by the task's own checker, for loops that ask."""

        def check(text: str) -> float:
            known = (prompt.answer, prompt.row, prompt.task, prompt.domain)
            sample = RewardSample("", text, *known, finish="", key=str(prompt), response_tokens=0)
            try:
                return self.functions.check(sample)
            except PracticumError as error:  # of a user's own kind of task: the session fails, not the run
                raise SessionError(str(error)) from None

        return check

    def _rows(self, attempt: Attempt, ended: AttemptResult) -> list[SessionRow]:
        assert ended.result is not None
        rewarded = zip(ended.result.trajectories, ended.result.row_rewards(), strict=True)
        return [
            SessionRow(Key(attempt.prompt.uid, attempt.session, i), self._tags(attempt, ended, t, reward), t)
            for i, (t, reward) in enumerate(rewarded)
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
            step=prompt.step,
            recorded=prompt.recorded,
        )

    def _columns(self, rows: Sequence[SessionRow], fields: Sequence[str]) -> dict[str, Column]:
        trajectories = [row.trajectory for row in rows if row.trajectory is not None]
        columns = [trajectory.columns() for trajectory in trajectories]
        put: dict[str, Column] = {
            f: Ragged.from_rows([c[f] for c in columns]) for f in fields if f not in VISION_FIELDS
        }
        if set(VISION_FIELDS) <= set(fields):
            pictures = [t.images for t in trajectories]
            put["multi_modal_inputs"] = [
                {} if picture is None else picture.as_inputs() for picture in pictures
            ]
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
        step=prompt.step,
        recorded=prompt.recorded,
    )
    return SessionRow(Key(prompt.uid, attempt.session), tags, None)


def _batch(partition: str, rows: Sequence[SessionRow]) -> BatchRef:
    return BatchRef(partition, tuple(row.key for row in rows), tuple(row.tags for row in rows))
