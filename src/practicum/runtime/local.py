"""All roles in this process. Without a lag the learner and the engine share one model object; with one, each
engine has its own copy of the weights and works beside the learner: on a CPU in a process of its own. vLLM's
takes the weights of the steps in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from practicum.checks.watch import Watch
from practicum.concurrency.gather import gather_all
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.devices import pick_device
from practicum.engines.protocol import Engine
from practicum.engines.torch.engine_process import EngineProcess
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.engines.vllm.make_vllm import takes_adapter
from practicum.models.load_model import context_length, load_model
from practicum.models.lora import copy_on_base
from practicum.places.model_cache import ModelCache
from practicum.recipe.derived import evaluates, lag, rollout_context, sampling_engines, sampling_s
from practicum.recipe.schema.recipe import Recipe
from practicum.records.record_files import RecordPlace
from practicum.records.recorder import Recorder
from practicum.records.recording_store import RecordingStore, stage_span
from practicum.roles.load_teachers import load_teachers, make_model_cache
from practicum.roles.make_engine import Weights, describe_engines, make_engines, start_engine_process
from practicum.roles.reward import RewardRole
from practicum.roles.reward_models import RewardModelRole, RewardModels, load_reward_models
from practicum.roles.rollout import Finished, RolloutRole, SessionRunner
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import evaluation_plan
from practicum.roles.sync import PublishedWeights, SyncProbe
from practicum.roles.teachers import TeacherRole, Teachers
from practicum.roles.train_rank import TrainRank, set_threads
from practicum.roles.weight_turns import WeightTurns
from practicum.sessions.attempts import Attempt
from practicum.sessions.session import SessionStart
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.prompts import Prompt
from practicum.tasks.rewards import RewardFunctions


@dataclass(frozen=True, slots=True)
class FrozenModels:
    """Models beside the student: teachers, reward models, and the cache that wakes the colocated ones."""

    teachers: Teachers | None
    reward_models: RewardModels
    residency: ModelCache

    def close(self) -> None:
        """Stop all of them."""
        with ExitStack() as stack:
            stack.callback(self.reward_models.close)
            if self.teachers is not None:
                stack.callback(self.teachers.close)


class LocalWorkers:
    """Sessions and their scoring in this process; see `roles.rollout.SessionWorkers`."""

    def __init__(
        self, sessions: SessionRunner, reward: RewardRole, teachers: TeacherRole | None, engine: Engine
    ) -> None:
        self.sessions, self.rewards, self.teachers, self.engine = sessions, reward, teachers, engine

    async def run(
        self,
        attempts: Sequence[Attempt],
        partition: str,
        seed: int,
        *,
        at_once: Callable[[Prompt], bool],
        finished: Finished,
    ) -> list[Key]:
        """A session's rows are in the store as soon as it is done."""
        prompts = {attempt.prompt.uid: attempt.prompt for attempt in attempts}
        starts = {uid: self.sessions.start(prompt) for uid, prompt in prompts.items()}

        async def run(attempt: Attempt, start: SessionStart) -> BatchRef:
            rows = await self.sessions.run(attempt, start, seed)
            batch = self.sessions.put(partition, rows, self.sessions.plan["rollout"].writes)
            if (scoring := finished(batch)) is not None:
                await scoring
            return batch

        with stage_span(self.sessions.store, "rollout", attempts[0].prompt.step, rows=len(attempts)):
            batches = await gather_all(run(attempt, starts[attempt.prompt.uid]) for attempt in attempts)
        return [key for batch in batches for key in batch.keys]

    async def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        with stage_span(self.sessions.store, "demonstrate", prompts[0].step, rows=len(prompts)):
            sessions = await gather_all(self.sessions.demonstrate(prompt) for prompt in prompts)
            rows = [row for session in sessions for row in session]
            return self.sessions.put(partition, rows, self.sessions.plan["demonstrate"].writes)

    async def reward_session(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        await self.rewards.score_session(batch, prompts)

    def reward(self, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        self.rewards.reward(StepInfo(batch, batch.tags[0].step, prompts=prompts))

    async def teach(self, teacher: str, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        assert self.teachers is not None
        await self.teachers.score_session(teacher, batch, prompts)

    @contextmanager
    def engines_asleep(self) -> Iterator[None]:
        self.engine.sleep()
        try:
            yield
        finally:
            self.engine.wake()

    def named_blocks(self) -> AbstractContextManager[None]:
        return nullcontext()


class LocalRoles(TrainRank):
    """The only rank of the learner, with the engine and the sessions beside it; see `Roles`."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        watch: Watch,
        model: PreTrainedModel,
        frozen: FrozenModels,
        record: RecordPlace | None = None,
        engine_process: EngineProcess | None = None,
    ) -> None:
        store: Store = MemoryStore()
        if record is not None:
            store = RecordingStore(store, Recorder(record))
        self.lag, copies, engines = lag(recipe), range(lag(recipe) + 1), range(sampling_engines(recipe))
        self.engine_process, sampling = engine_process, [model]
        if self.lag and engine_process is None and recipe.rollout.engine == "torch":
            sampling = [copy_on_base(model).requires_grad_(False) for _ in engines]
        super().__init__(recipe, plan, store, watch, model, frozen.teachers)
        self.frozen, self.toolbox = frozen, Toolbox(recipe.agent.tools)
        self.probes = [SyncProbe(recipe, watch) for _ in engines]
        self.published: dict[int, PublishedWeights] = {}
        self._turns = [WeightTurns(sampling_s(recipe), held=0) for _ in engines]
        self.engines: list[Engine] = []
        try:
            if engine_process is not None:
                engine_process.ready()
                self.engines += engine_process.engines
            else:
                self.engines += make_engines(recipe, sampling, self._engine_weights)
            of_copies = [self.engines[copy % len(engines)] for copy in copies]
            self.rollouts = [self._make_rollout(plan, model, engine) for engine in of_copies]
            self.eval_rollouts = [
                self._make_rollout(evaluation_plan(), model, engine) for engine in of_copies
            ]
            self.probe_weights()
            if self.lag:
                self.publish(0)
        except BaseException:
            for engine in self.engines:
                engine.close()
            raise

    @property
    def rollout(self) -> RolloutRole:
        """The first one's."""
        return self.rollouts[0]

    @property
    def eval_rollout(self) -> RolloutRole:
        return self.eval_rollouts[0]

    @property
    def engine(self) -> Engine:
        return self.engines[0]

    def _make_rollout(self, plan: Plan, model: PreTrainedModel, engine: Engine) -> RolloutRole:
        recipe, store, frozen = self.recipe, self.store, self.frozen
        functions = RewardFunctions(recipe.tasks, recipe.reward)
        teachers = self.teachers if "teachers" in plan else None
        sessions = SessionRunner(
            recipe,
            plan,
            store,
            engine,
            self.encoder,
            functions,
            self.toolbox,
            context=rollout_context(recipe, context_length(model)),
            config=model.config,
            teacher_of=None if teachers is None else teachers.teacher_of,
        )
        models = None
        if frozen.reward_models.places and "reward" in plan:
            models = RewardModelRole(recipe, frozen.reward_models, frozen.residency, store)
        reward = RewardRole(recipe, plan, store, self.encoder, functions, models)
        return RolloutRole(recipe, plan, store, LocalWorkers(sessions, reward, teachers, engine))

    def describe(self, planned: float | None = None) -> list[str]:
        places = [] if self.frozen.teachers is None else self.frozen.teachers.places.values()
        return [*self.describe_memory(planned), *describe_engines(self.engine, *places)]

    def _engine_weights(self) -> tuple[Weights, int]:
        """The learner's weights, as the engine takes them: of some models, vLLM takes no adapters."""
        learner = self.student.learner
        plain = self.recipe.rollout.engine == "vllm" and not takes_adapter(learner.model)
        return learner.plain_weights() if plain else learner.named_weights(), learner.version

    def run(self, stage: str, step: StepInfo) -> Any:
        return self.stages[stage](step)

    def refresh_copies(self, step: int) -> None:
        assert self.teachers is not None
        self.teachers.refresh(step)

    def teachers_spent(self) -> tuple[dict[str, float], dict[str, int]]:
        assert self.teachers is not None
        return self.teachers.spent()

    def publish(self, step: int) -> None:
        if not self.lag:
            self.sync_weights()
            return
        looks = self.probes[0].looks
        fingerprint = self.fingerprint(self.probes[0].length) if looks else ()
        copied = PublishedWeights.copy(*self._engine_weights(), fingerprint)
        kept = {old: weights for old, weights in self.published.items() if old >= step - self.lag}
        self.published = kept | {step: copied}

    def sync_weights(self) -> None:
        """The engine takes the learner's weights."""
        self.engine.load_weights(*self._engine_weights())
        if not self._is_one_model:  # one whose tensors are the learner's own can't have others
            self.probe_weights()

    @property
    def _is_one_model(self) -> bool:
        """Whether the engine computes with the learner's model object."""
        return isinstance(self.engine, TorchEngine) and self.engine.runner.model is self.student.learner.model

    def weights(self, copy: int, step: int) -> AbstractContextManager[None]:
        if not self.lag:
            return nullcontext()
        number = copy % len(self.engines)
        return self._turns[number].use(step, lambda: self._give(number, step))

    def _give(self, number: int, step: int) -> None:
        """An engine takes the weights after this step."""
        published, engine, probe = self.published[step], self.engines[number], self.probes[number]
        engine.load_weights(published.weights.items(), published.version)
        if probe.looks:
            probe.check([engine.fingerprint().tolist()], lambda _: published.fingerprint)

    def version_of(self, step: int) -> int:
        return self.published[step].version if self.lag else self.student.learner.version

    def probe_weights(self) -> None:
        """Check that the engines have the learner's weights."""
        for engine, probe in zip(self.engines, self.probes, strict=True):
            if probe.looks:
                probe.check([engine.fingerprint().tolist()], self.fingerprint)

    def save(self, folder: Path, rows: bool = True) -> None:
        super().save(folder, rows)
        for step, weights in self.published.items():
            if (step, weights.version) != (max(self.published), self.version):  # else they are the student's
                weights.save(folder / "sampling", step)

    def load(self, folder: Path, kl_state: Mapping[str, float]) -> int:
        version = super().load(folder, kl_state)
        if self.lag:
            self.published = PublishedWeights.load_all(folder / "sampling")
            for turns in self._turns:
                turns.forget()
        else:
            self.sync_weights()
        return version

    def incidents(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Stop what runs in the background."""
        with ExitStack() as stack:
            if self.engine_process is not None:
                stack.callback(self.engine_process.close)
            for engine in self.engines:
                stack.callback(engine.close)
            stack.callback(self.toolbox.close)
            stack.callback(self.frozen.close)


def load_frozen_models(recipe: Recipe, plan: Plan, student: PreTrainedModel) -> FrozenModels:
    """Teachers and reward models, if the plan or evaluations need them."""
    reward_models = RewardModels()
    if recipe.reward.models and ("reward" in plan or evaluates(recipe)):
        # Another tokenizer may need more tokens than the student's for the same text.
        reward_models = load_reward_models(recipe, room=2 * rollout_context(recipe, None))
    with ExitStack() as undo:
        undo.callback(reward_models.close)
        sleepers = reward_models.sleepers()
        teachers = load_teachers(recipe, student, sleepers) if "teachers" in plan else None
        residency = None if teachers is None else teachers.residency
        undo.pop_all()
    return FrozenModels(teachers, reward_models, residency or make_model_cache(recipe, sleepers))


def start_local(recipe: Recipe, plan: Plan, watch: Watch, record: RecordPlace | None = None) -> LocalRoles:
    """Load the models and connect the roles; if that fails, nothing stays behind."""
    threads = set_threads(recipe.runtime.threads, sides=2 if lag(recipe) else 1)
    with ExitStack() as undo:
        engine_process = None
        if has_engine_process(recipe):
            engine_process = start_engine_process(recipe, threads)  # it loads its model meanwhile
            undo.callback(engine_process.close)
        model = load_model(recipe.model, recipe.seed)
        frozen = load_frozen_models(recipe, plan, model)
        undo.callback(frozen.close)
        roles = LocalRoles(recipe, plan, watch, model, frozen, record, engine_process)
        undo.pop_all()
    return roles


def has_engine_process(recipe: Recipe) -> bool:
    """Whether engines have a process of their own: on a CPU, they would keep the learner from Python."""
    is_torch = recipe.rollout.engine == "torch"
    return lag(recipe) > 0 and is_torch and pick_device(recipe.model.device).type == "cpu"
