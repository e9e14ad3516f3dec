"""All roles in this process. Without a lag, learner and engine share a model object. With a lag, each engine
has a copy of the weights and runs concurrently with the learner, on a CPU in a separate process. A vLLM
engine loads the weights of the steps in turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from practicum.checks.watch import Watch
from practicum.concurrency.gather import gather_all, in_thread
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.stages import Plan
from practicum.devices import pick_device
from practicum.engines.hosted_engine import HostedEngine
from practicum.engines.kind import Weights
from practicum.engines.model_cache import ModelCache, make_model_cache
from practicum.engines.protocol import Engine
from practicum.engines.table import ENGINES
from practicum.engines.torch.make_torch import start_lagged_engines
from practicum.models.load_model import context_length, load_model
from practicum.models.lora import copy_on_base
from practicum.observe.records.record_files import RecordPlace
from practicum.observe.records.recorder import Recorder
from practicum.recipe.schema.recipe import Recipe
from practicum.rewards.reward_scorer import RewardScorer, judge_room, load_reward_models, sleeping_models
from practicum.rewards.score_functions import RewardFunctions
from practicum.roles.learner_rank import LearnerRank, set_threads
from practicum.roles.probe_teachers import asks_of, compare_teachers
from practicum.roles.reward import RewardRole
from practicum.roles.rollout import Finished, RolloutRole, SessionRow, SessionRunner
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import evaluation_plan
from practicum.roles.sync import PublishedWeights, SyncProbe, WeightLock, describe_engines, make_engines
from practicum.roles.teachers import TeacherRole
from practicum.sessions.attempts import Attempt
from practicum.sessions.endpoint.other_python import close_processes
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.prompts import Prompt
from practicum.teachers.load_teachers import Teachers, load_teachers
from practicum.teachers.route import teacher_of


@dataclass(frozen=True, slots=True)
class FrozenModels:
    """Models other than the student, and the cache that wakes colocated ones."""

    teachers: Teachers | None
    reward_models: dict[str, RewardScorer]
    residency: ModelCache

    def close(self) -> None:
        with ExitStack() as stack:
            for scorer in self.reward_models.values():
                stack.callback(scorer.close)
            if self.teachers is not None:
                stack.callback(self.teachers.close)


class LocalWorkers:
    """Sessions and their scoring in this process. See `roles.rollout.SessionWorkers`."""

    def __init__(
        self,
        sessions: SessionRunner,
        reward: RewardRole,
        teachers: TeacherRole | None,
        engine: Engine,
        answering: Teachers | None = None,
    ) -> None:
        """`answering` are teachers that sample responses in place of the engine."""
        self.sessions, self.rewards, self.teachers, self.engine = sessions, reward, teachers, engine
        self.answering = answering

    async def run(
        self,
        attempts: Sequence[Attempt],
        partition: str,
        seed: int,
        *,
        at_once: Callable[[Prompt], bool],
        finished: Finished,
    ) -> list[Key]:
        prompts = {attempt.prompt.uid: attempt.prompt for attempt in attempts}
        starts = {uid: self.sessions.start(prompt) for uid, prompt in prompts.items()}
        keys: list[Key] = []

        def write(rows: Sequence[SessionRow]) -> Coroutine[Any, Any, None] | None:
            batch = self.sessions.put(partition, rows, "rollout")
            keys.extend(batch.keys)
            return finished(batch)

        by_teacher: dict[str, list[Attempt]] = {}
        for attempt in attempts:
            by_teacher.setdefault(self.sessions.answerer(attempt), []).append(attempt)
        with self.sessions.recorder.span("rollout", attempts[0].prompt.step, rows=len(attempts)):
            for teacher, asked in by_teacher.items():
                awake = self.answering.awake(teacher) if teacher and self.answering else nullcontext()
                async with in_thread(awake) if teacher else nullcontext(), asyncio.TaskGroup() as group:
                    for attempt in asked:
                        group.create_task(self.sessions.run(attempt, starts[attempt.prompt.uid], seed, write))
        return keys

    async def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        with self.sessions.recorder.span("demonstrate", prompts[0].step, rows=len(prompts)):
            sessions = await gather_all(self.sessions.demonstrate(prompt) for prompt in prompts)
            rows = [row for session in sessions for row in session]
            return self.sessions.put(partition, rows, "demonstrate")

    async def reward(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        await self.rewards.reward(StepInfo(batch, batch.tags[0].step, prompts=prompts))

    @property
    def reward_s(self) -> float:
        return self.rewards.stage_s

    async def teach(self, teacher: str, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        assert self.teachers is not None
        await self.teachers.score(StepInfo(batch, batch.tags[0].step, prompts=prompts))

    @contextmanager
    def engines_asleep(self) -> Iterator[None]:
        self.engine.sleep()
        try:
            yield
        finally:
            self.engine.wake()

    named_blocks = nullcontext


class LocalRoles:
    """The only rank of the learner, with engine and sessions. See `Roles`."""

    ranks = 1

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        watch: Watch,
        model: PreTrainedModel,
        frozen: FrozenModels,
        record: RecordPlace | None = None,
        hosted: Sequence[HostedEngine] = (),
    ) -> None:
        self.lag = recipe.rollout.lag
        copies, engines = range(self.lag + 1), range(recipe.sampling_engines)
        self.kind, sampling = ENGINES[recipe.rollout.engine], [model]
        if self.lag and not hosted and self.kind.shares_model:
            sampling = [copy_on_base(model).requires_grad_(False) for _ in engines]
        self.recipe, self.store, recorder = recipe, MemoryStore(), Recorder(record)
        scoring = frozen.teachers if "teachers" in plan else None
        rank = LearnerRank(recipe, plan, self.store, watch, model, scoring, recorder=recorder)
        self.rank, self.stop, self.stages, self.export = rank, rank.stop, rank.stages, rank.export
        self.transcripts, self.session_advantages = rank.transcripts, rank.session_advantages
        self.kl_state, self.updates = rank.kl_state, rank.updates
        self.refresh_copies, self.teachers_spent = rank.refresh_copies, rank.teachers_spent
        self.frozen, self.toolbox = frozen, Toolbox(recipe.agent.tools)
        self.probes = [SyncProbe(recipe.model.dtype, watch) for _ in engines]
        self.published: dict[int, PublishedWeights] = {}
        self._turns = [WeightLock(recipe.sampling_s, held=0) for _ in engines]
        self.engines: list[Engine] = []
        try:
            for engine in hosted:
                engine.ready()
            self.engines += hosted
            if not hosted:
                self.engines += make_engines(
                    recipe.rollout, recipe.model.path, sampling, self._engine_weights
                )
            of_copies = [self.engines[copy % len(engines)] for copy in copies]
            self.rollouts = [self._make_rollout(plan, model, engine) for engine in of_copies]
            self.eval_rollouts = [
                self._make_rollout(evaluation_plan(self.lag), model, engine) for engine in of_copies
            ]
            self.stages["sync"] = lambda step: self.publish(step.number)
            if "teachers" in self.stages:
                self.stages["teachers"] = self.rollout.after_rollout(self.stages["teachers"])
            self.probe_weights()
            if self.lag:
                self.publish(0)
        except BaseException:
            for engine in self.engines:
                engine.close()
            raise

    @property
    def rollout(self) -> RolloutRole:
        return self.rollouts[0]

    @property
    def engine(self) -> Engine:
        return self.engines[0]

    @property
    def version(self) -> int:
        return self.rank.version

    def _make_rollout(self, plan: Plan, model: PreTrainedModel, engine: Engine) -> RolloutRole:
        recipe, store, frozen, encoder = self.recipe, self.store, self.frozen, self.rank.encoder
        functions, recorder = RewardFunctions(recipe.tasks, recipe.reward), self.rank.recorder
        teachers, route, answering = None, None, None
        if "teachers" in plan:
            teachers = self.rank.teachers
        if recipe.teachers_answer and "update_student" in plan:
            answering = frozen.teachers
        if teachers is not None or answering is not None:
            route = partial(teacher_of, route=recipe.route, teachers=recipe.teachers, seed=recipe.seed)
        sessions = SessionRunner(
            recipe.agent,
            recipe.session_deadline,
            plan,
            store,
            engine,
            encoder,
            functions,
            self.toolbox,
            context=recipe.rollout.context_for(context_length(model)),
            config=model.config,
            teacher_of=route,
            answerers=None if answering is None else answering.scorers,
            recorder=recorder,
        )
        deadline_s, models = recipe.rollout.deadline_s, frozen.reward_models if "reward" in plan else None
        reward = RewardRole(
            recipe.reward,
            recipe.tasks,
            plan,
            store,
            encoder,
            functions,
            models,
            frozen.residency,
            recorder,
            deadline_s=deadline_s,
            learnt=recipe.uses_reward or answering is not None,
        )
        workers = LocalWorkers(sessions, reward, teachers, engine, answering)
        others = functions, recipe.reward.models, recipe.teachers
        return RolloutRole(plan, store, workers, *others, deadline_s=deadline_s)

    def compare_teachers(self) -> tuple[list[str], list[str]]:
        if (teachers := self.frozen.teachers) is None:
            return [], []
        model = self.rank.student.learner.model
        found = compare_teachers(self.recipe, model, self.engine, asks_of(teachers))
        self.teachers_spent()  # not the scoring of a step
        return found

    def describe(self) -> list[str]:
        teachers = [] if self.frozen.teachers is None else self.frozen.teachers.scorers.values()
        return describe_engines(self.engine, *[scorer for teacher in teachers for scorer in teacher.scorers])

    def _engine_weights(self) -> tuple[Weights, int]:
        learner = self.rank.student.learner
        merged = self.kind.merges_adapter(learner.model)
        return learner.plain_weights() if merged else learner.named_weights(), learner.version

    def publish(self, step: int) -> None:
        if not self.lag:
            self.sync_weights()
            return
        looks = self.probes[0].looks
        fingerprint = self.rank.fingerprint(self.probes[0].length) if looks else ()
        copied = PublishedWeights.copy(*self._engine_weights(), fingerprint)
        kept = {old: weights for old, weights in self.published.items() if old >= step - self.lag}
        self.published = kept | {step: copied}

    def sync_weights(self) -> None:
        self.engine.load_weights(*self._engine_weights())
        if self.engine.model is not self.rank.student.learner.model:  # else it can't have other weights
            self.probe_weights()

    def weights(self, copy: int, step: int) -> AbstractContextManager[None]:
        if not self.lag:
            return nullcontext()
        number = copy % len(self.engines)
        return self._turns[number].use(step, lambda: self._give(number, step))

    def _give(self, number: int, step: int) -> None:
        published, engine, probe = self.published[step], self.engines[number], self.probes[number]
        engine.load_weights(published.weights.items(), published.version)
        if probe.looks:
            probe.check([engine.fingerprint().tolist()], lambda _: published.fingerprint)

    def version_of(self, step: int) -> int:
        return self.published[step].version if self.lag else self.version

    def probe_weights(self) -> None:
        for engine, probe in zip(self.engines, self.probes, strict=True):
            if probe.looks:
                probe.check([engine.fingerprint().tolist()], self.rank.fingerprint)

    def save(self, folder: Path, rows: Collection[Key]) -> None:
        self.rank.save(folder, rows)
        for step, weights in self.published.items():
            if (step, weights.version) != (max(self.published), self.version):  # else they are the student's
                weights.save(folder / "sampling", step)

    def load(self, folder: Path, kl_state: Mapping[str, float]) -> None:
        self.rank.load(folder, kl_state)
        if self.lag:
            self.published = PublishedWeights.load_all(folder / "sampling")
            for turns in self._turns:
                turns.held = None
        else:
            self.sync_weights()

    def incidents(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        with ExitStack() as stack:
            for engine in self.engines:
                stack.callback(engine.close)
            stack.callback(self.toolbox.close)
            stack.callback(close_processes)
            stack.callback(self.frozen.close)


def start_local(recipe: Recipe, plan: Plan, watch: Watch, record: RecordPlace | None = None) -> LocalRoles:
    """Load the models and connect the roles. On failure, release everything."""
    spec, seed, rollout = recipe.model, recipe.seed, recipe.rollout
    threads = set_threads(recipe.runtime.threads, sides=2 if rollout.lag else 1)
    with ExitStack() as undo:
        hosted: list[HostedEngine] = []
        # In this process, engines on the CPU would keep the learner from Python.
        if rollout.lag and ENGINES[rollout.engine].hosts_lag and pick_device(spec.device).type == "cpu":
            hosted = start_lagged_engines(rollout, spec, seed, threads)  # these load their model concurrently
            undo.callback(hosted[0].close)
        model, reward_models, teachers = load_model(spec, seed), dict[str, RewardScorer](), None
        if recipe.reward.models and ("reward" in plan or recipe.evaluates):
            reward_models = load_reward_models(recipe.reward.models, judge_room(rollout))
            for scorer in reward_models.values():
                undo.callback(scorer.close)
        sleepers, residency = sleeping_models(reward_models), None
        if "teachers" in plan or (recipe.teachers_answer and "update_student" in plan):
            how = recipe.distill, recipe.runtime, spec, seed
            teachers = load_teachers(recipe.teachers, *how, model, sleepers)
            undo.callback(teachers.close)
            residency = teachers.residency
        residency = residency or make_model_cache(recipe.runtime, sleepers)
        frozen = FrozenModels(teachers, reward_models, residency)
        roles = LocalRoles(recipe, plan, watch, model, frozen, record, hosted)
        undo.pop_all()
    return roles
