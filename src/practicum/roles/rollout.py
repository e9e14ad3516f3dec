"""The rollout role: run sessions, and score finished ones immediately if possible.

This module holds the parts shared by all runtimes: how a session becomes rows (`SessionRunner`), which
sessions are scored early, their bookkeeping, and the remaining rewards. The runtime decides where sessions
run and are scored (`SessionWorkers`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from practicum.concurrency.busy_time import OverlapFraction
from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column, Ragged
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.engines.protocol import Engine, Generates, Sampling
from practicum.errors import PracticumError, SessionError
from practicum.models.vision import sequence_positions
from practicum.observe.records.recorder import NOT_RECORDED, SAMPLED, Recorder
from practicum.recipe.schema.rollout_sections import Agent
from practicum.recipe.schema.teacher_sections import RewardModel, Teacher
from practicum.rewards.score_functions import RewardFunctions, RewardSample
from practicum.roles.reward import SessionName
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import VISION_FIELDS
from practicum.roles.teachers import prompts_read
from practicum.sessions.attempts import Attempt, AttemptResult, find_loop, run_attempt
from practicum.sessions.demonstrator import DemonstratorPolicy, make_demonstrator
from practicum.sessions.session import EnginePolicy, Policy, Session, SessionStart, Trajectory
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.prompts import Encoder, Prompt

Finished = Callable[[BatchRef], Coroutine[Any, Any, None] | None]
"""Takes the rows of finished sessions, and returns the work of scoring them, or None."""


class SessionWorkers(Protocol):
    """Runs and scores sessions in this process, or on replicas of a cluster."""

    async def run(
        self,
        attempts: Sequence[Attempt],
        partition: str,
        seed: int,
        *,
        at_once: Callable[[Prompt], bool],
        finished: Finished,
    ) -> list[Key]:
        """Run sessions, write their rows including failed ones, and return the keys.

        `finished` receives the written rows, and the work it returns is awaited before this returns. For
        prompts with `at_once`, it receives each session as soon as it is done.
        """
        ...

    async def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        """Write the SFT rows of each prompt, in the prompts' order."""
        ...

    async def reward(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        """Score finished sessions and write their rewards."""
        ...

    @property
    def reward_s(self) -> float:
        """Deadline of the reward of a batch in seconds."""
        ...

    async def teach(self, teacher: str, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        """Score a session with a teacher in a separate process or on a server."""
        ...

    def engines_asleep(self) -> AbstractContextManager[None]:
        """Free the memory of the student's engines inside the context."""
        ...

    def named_blocks(self) -> AbstractContextManager[None]:
        """Add to a DeadlineError of the context the function that blocks another process's event loop."""
        ...


class RolloutRole:
    """Rolls out and scores sessions. Training and evaluation each have one."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        workers: SessionWorkers,
        functions: RewardFunctions,
        models: Mapping[str, RewardModel],
        teachers: Mapping[str, Teacher],
        *,
        deadline_s: float,
    ) -> None:
        """`models` are reward models, and `deadline_s` is the rollout's."""
        self.plan, self.store, self.workers, self._deadline_s = plan, store, workers, deadline_s
        self._functions, self._models, self._teachers = functions, models, teachers
        self._waits = any(not model.scores_during_rollout for model in models.values())
        """True if rewards wait for colocated models, which run while the student's engines sleep."""
        self.prompts: dict[Key, Prompt] = {}
        """The prompt of each row in the store."""
        self.hidden = OverlapFraction()
        taught = teachers.items() if "teachers" in plan else ()
        self._whole_prompts = "teachers" in plan and "teacher_match" in plan["teachers"].writes
        self._own_teachers = {name for name, teacher in taught if teacher.scores_during_rollout}
        self.open: dict[SessionName, Prompt] = {}
        """Sessions of the current rollout that have not run or are not scored early yet."""
        self._kept: set[Key] = set()
        """Rows from a checkpoint, until their step is sampled."""
        self._rewarded: set[SessionName] = set()
        """Sessions with a reward."""

    def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        """Write the SFT rows of each prompt."""
        work = self.workers.demonstrate(prompts, partition)
        batch = run_async(work, timeout=self._deadline_s, owner="demonstrations")
        self._remember(batch.keys, {prompt.uid: prompt for prompt in prompts})
        return batch

    def rollout(self, attempts: Sequence[Attempt], partition: str, *, seed: int) -> BatchRef:
        """Run sessions concurrently, except those that a checkpoint holds. The batch is sorted by key."""
        prompts = {attempt.prompt.uid: attempt.prompt for attempt in attempts}
        kept = [key for key in self._kept if key.prompt in prompts]
        self._remember(kept, prompts)
        self._kept.difference_update(kept)
        ran = {key[:2] for key in kept}
        attempts = [a for a in attempts if (a.prompt.uid, a.session) not in ran]
        self.open = {(a.prompt.uid, a.session): a.prompt for a in attempts}
        self._rewarded -= self.open.keys()
        keys: list[Key] = []

        def finished(rows: BatchRef) -> Coroutine[Any, Any, None] | None:
            self.hidden.session_ended()
            self._remember(rows.keys, prompts)
            ready = rows.where(lambda _, tags: tags.status == "ready")
            judged = ready.where(lambda _, tags: tags.loop_reward is None and self._rewards_early(tags.task))
            taught = ready.where(lambda _, tags: tags.teacher in self._own_teachers and not tags.is_baseline)
            if judged or taught:
                return self._score(rows, judged, taught)
            self._close(rows)

        if attempts:
            early = bool(self._own_teachers)
            how = {"at_once": lambda p: early or self._rewards_early(p.task), "finished": finished}
            work = self.workers.run(attempts, partition, seed, **how)
            with self.hidden.rollout(), self.workers.named_blocks():
                keys = run_async(work, timeout=self._deadline_s, owner=f"rollout ({partition})")
        # Sessions finish in any order, so the batch is sorted by key.
        return self.store.batch(partition, sorted([*kept, *keys]))

    def reward(self, batch: BatchRef) -> None:
        """Score the sessions that were not scored during the rollout."""
        left = batch.where(lambda key, _: key[:2] not in self._rewarded)
        if left:
            work = self.workers.reward(left, {key: self.prompts[key] for key in left.keys})
            asleep = self.engines_asleep() if self._waits else nullcontext()
            with asleep, self.workers.named_blocks():
                run_async(work, timeout=self.workers.reward_s, owner="reward")
        self._rewarded.update(key[:2] for key in left.keys)

    def engines_asleep(self) -> AbstractContextManager[None]:
        """Free the memory of the student's engines, except with a lag, where they keep sampling."""
        return nullcontext() if self.plan.lag else self.workers.engines_asleep()

    def after_rollout(self, stage: Callable[[StepInfo], Any]) -> Callable[[StepInfo], Any]:
        """Wrap a stage of colocated teachers so that it runs on waiting rows while engines sleep."""

        def run(step: StepInfo) -> Any:
            waiting = step.batch.where(
                lambda _, tags: tags.teacher is not None and tags.teacher not in self._own_teachers
            )
            if not waiting:
                return None
            prompts = prompts_read(self._teachers, waiting, step.prompts, whole=self._whole_prompts)
            with self.engines_asleep():
                return stage(replace(step, batch=waiting, prompts=prompts))

        return run

    def done_rows(self) -> tuple[list[Key], list[SessionName]]:
        """Return the rows of finished sessions, and the sessions with a reward."""
        rewarded, rows = sorted(self._rewarded.copy()), self.prompts.copy()
        return sorted({key for key in rows if key[:2] not in self.open} | self._kept), rewarded

    def restore(self, done: Iterable[Key], rewarded: Iterable[SessionName]) -> None:
        """Restore the result of `done_rows`. The store must hold the rows."""
        self._kept, self._rewarded = set(done), set(rewarded)

    def clear(self, step: StepInfo) -> None:
        """Remove all rows of the step from the store, including padding and excluded rows."""
        keys = list(dict.fromkeys([*self.prompts, *step.batch.keys]))
        self.store.clear(step.batch.partition, keys)
        self.forget(keys)

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.prompts.pop(key, None)
            self._rewarded.discard(key[:2])

    def _remember(self, keys: Iterable[Key], prompts: Mapping[int, Prompt]) -> None:
        self.prompts.update((key, prompts[key.prompt]) for key in keys)

    def _close(self, rows: BatchRef) -> None:
        for key in rows.keys:
            self.open.pop(key[:2], None)

    def _rewards_early(self, task: str) -> bool:
        """Return True if sessions of this task are scored as soon as they finish.

        Colocated reward models wait until the engines sleep, and batch functions need all sessions. Functions
        must also be slow enough to be worth it.
        """
        if "reward" not in self.plan or self._waits or not self._functions.divides(task):
            return False
        return bool(self._models) or self._functions.streams(task)

    async def _score(self, rows: BatchRef, judged: BatchRef, taught: BatchRef) -> None:
        works, prompts = [], {key: self.prompts[key] for key in judged.keys}
        if judged:
            works.append(self.workers.reward(judged, prompts))
        if taught:
            assert taught.tags[0].teacher is not None
            read = prompts_read(self._teachers, taught, self.prompts, whole=self._whole_prompts)
            works.append(self.workers.teach(taught.tags[0].teacher, taught, read))
        by_models = bool(taught) or bool(self._models)
        with self.hidden.scoring() if by_models else nullcontext():
            await gather_all(works)
        self._rewarded.update(key[:2] for key in judged.keys)
        self._close(rows)


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A row to write. A failed session has no trajectory, and its row has no fields."""

    key: Key
    tags: Tags
    trajectory: Trajectory | None


class SessionRunner:
    """Runs sessions with an engine, or plays back SFT examples."""

    def __init__(
        self,
        agent: Agent,
        deadline_s: float,
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
        answerers: Mapping[str, Generates] | None = None,
        recorder: Recorder = NOT_RECORDED,
    ) -> None:
        """`deadline_s` is a session's, and `teacher_of` returns the teacher of a prompt. `answerers` are
        teachers that sample responses in place of the engine."""
        self.agent, self.deadline_s = agent, deadline_s
        self.plan, self.store, self.recorder = plan, store, recorder
        self.encoder, self.functions, self.toolbox = encoder, functions, toolbox
        self.tokenizer = encoder.tokenizer
        self.context, self.config, self.teacher_of = context, config, teacher_of
        self.vocab: int = config.get_text_config().vocab_size
        self.loop = find_loop(agent.loop)
        keep = agent.loop != "single_turn"
        self._policy = EnginePolicy(engine, keep=keep)
        self._policies = {name: EnginePolicy(one, keep=keep) for name, one in (answerers or {}).items()}
        assert isinstance(self.tokenizer.eos_token_id, int)
        self.end_id = self.tokenizer.eos_token_id

    def start(self, prompt: Prompt) -> SessionStart:
        """Return the prompt in the model's format."""
        encoded = self.encoder(prompt)
        return SessionStart(encoded.ids, encoded.images, encoded.messages, self.encoder.tools)

    def run(
        self,
        attempt: Attempt,
        start: SessionStart,
        seed: int,
        then: Callable[[list[SessionRow]], Awaitable[None] | None],
    ) -> Coroutine[Any, Any, AttemptResult]:
        """Run a session. `then` receives its rows, and the work it returns is awaited."""
        policy = self._policies[self.answerer(attempt)] if self._policies else self._policy
        return self._attempt(attempt, start, policy, seed, lambda ended: then(self.rows(attempt, ended)))

    def answerer(self, attempt: Attempt) -> str:
        """Return the teacher that responds to a prompt in place of the engine, or ""."""
        return self.teacher_of(attempt.prompt) if self._policies and self.teacher_of is not None else ""

    async def demonstrate(self, prompt: Prompt) -> list[SessionRow]:
        """Play back an SFT example in the agent loop, and return its rows."""
        sampling = Sampling(max_new_tokens=self.context, stop=frozenset({self.end_id}))
        policy = DemonstratorPolicy(make_demonstrator(self.agent, self.toolbox), self.tokenizer)
        attempt = Attempt(prompt, 0, sampling)
        ended = await self._attempt(attempt, self.start(prompt), policy, 0, lambda ended: None)
        if ended.result is None:
            error = PracticumError(f"{prompt} has no SFT example: {ended.failure}")
            error.details = ended.trace or ""
            raise error
        return self.rows(attempt, ended)

    def put(self, partition: str, rows: Sequence[SessionRow], stage: str) -> BatchRef:
        """Write rows with the fields of a stage in one put, and failed rows without fields."""
        done = [row for row in rows if row.trajectory is not None]
        failed = [row for row in rows if row.trajectory is None]
        for part in (failed, done):
            if part:
                batch = _batch(partition, part)
                columns = self._columns(part, self.plan[stage].writes) if part is done else {}
                self.store.put(batch, columns)
                self.recorder.add(stage, batch, columns, SAMPLED)
                if any(tags.version_min != tags.version_max for tags in batch.tags):
                    versions = [row.trajectory.versions() for row in part if row.trajectory is not None]
                    self.recorder.add(stage, batch, {"version": versions})
        return _batch(partition, rows)

    def _attempt(
        self,
        attempt: Attempt,
        start: SessionStart,
        policy: Policy,
        seed: int,
        then: Callable[[AttemptResult], Awaitable[None] | None],
    ) -> Coroutine[Any, Any, AttemptResult]:
        def make(number: int) -> Session:
            return Session(
                attempt.prompt,
                start,
                attempt.session,
                policy,
                attempt.sampling,
                self.tokenizer,
                context=self.context,
                agent=self.agent,
                toolbox=self.toolbox,
                check=partial(self._check, attempt.prompt),
                seed=seed,
                attempt=number,
                vocab=self.vocab,
            )

        return run_attempt(self.loop, self.agent, make, self.deadline_s, then)

    def _check(self, prompt: Prompt, text: str) -> float:
        """Score a text with the task's checker, for agent loops."""
        known = (prompt.answer, prompt.row, prompt.task, prompt.domain)
        sample = RewardSample("", text, *known, finish="", key=str(prompt), response_tokens=0)
        try:
            return self.functions.check(sample)
        except PracticumError as error:  # from a custom task: the session fails, not the run
            raise SessionError(str(error)) from None

    def rows(self, attempt: Attempt, ended: AttemptResult) -> list[SessionRow]:
        """Return the rows of a session. A failed one has a row without fields, which is only counted."""
        prompt = attempt.prompt
        common = Tags(
            domain=prompt.domain,
            task=prompt.task,
            retries=ended.retries,
            is_baseline=attempt.is_baseline,
            step=prompt.step,
            recorded=prompt.recorded,
        )
        if ended.result is None:
            tags = replace(common, status="failed", failure=ended.failure, trace=ended.trace)
            return [SessionRow(Key(prompt.uid, attempt.session), tags, None)]
        rows = []
        for i, trajectory in enumerate(ended.result.trajectories):
            pieces = trajectory.pieces
            tags = replace(
                common,
                prompt_tokens=len(trajectory.prompt_ids),
                response_tokens=sum(len(piece.ids) for piece in pieces),
                sampled_tokens=sum(len(piece.ids) for piece in pieces if piece.sampled),
                shared_tokens=trajectory.shared,
                version_min=trajectory.version_min or 0,
                version_max=trajectory.version_max,
                teacher=None if self.teacher_of is None else self.teacher_of(prompt),
                finish=trajectory.finish,
                turns=trajectory.turns,
                tool_calls=trajectory.tool_calls,
                tool_errors=trajectory.tool_errors,
                breaks=trajectory.breaks,
                repetition=trajectory.repetition,
                requests=trajectory.requests,
                clients=trajectory.clients,
                trace=trajectory.trace,
                loop_reward=ended.result.row_rewards()[i],
                reward_parts=trajectory.reward_parts,
            )
            rows.append(SessionRow(Key(prompt.uid, attempt.session, i), tags, trajectory))
        return rows

    def _columns(self, rows: Sequence[SessionRow], fields: Sequence[str]) -> dict[str, Column]:
        trajectories = [row.trajectory for row in rows if row.trajectory is not None]
        columns = [trajectory.columns() for trajectory in trajectories]
        put: dict[str, Column] = {
            f: Ragged.from_rows([c[f] for c in columns]) for f in fields if f not in VISION_FIELDS
        }
        if set(VISION_FIELDS) <= set(fields):
            put["multi_modal_inputs"] = [
                {} if t.images is None else t.images.as_inputs() for t in trajectories
            ]
            places = [sequence_positions(self.config, t.ids(), t.images) for t in trajectories]
            put["position_ids"] = Ragged.from_rows(places)
        return put


def _batch(partition: str, rows: Sequence[SessionRow]) -> BatchRef:
    return BatchRef(partition, tuple(row.key for row in rows), tuple(row.tags for row in rows))
