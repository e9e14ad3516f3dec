"""Starting a run on Ray: the cluster, the store, the workers, all at once and within a deadline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from practicum.checks.watch import Watch
from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.dataplane.stages import Plan
from practicum.errors import MissingExtraError
from practicum.recipe.derived import (
    computes_reward,
    data_parallel,
    engine_replicas,
    evaluates,
    has_own_process,
    own_options,
    scores_during_rollout,
)
from practicum.recipe.schema.recipe import Recipe
from practicum.records.record_files import RecordPlace

try:
    import ray

    from practicum.dataplane.ray_store.ray_store import start_ray_store
    from practicum.dataplane.transferqueue.transferqueue_store import start_transferqueue
except ModuleNotFoundError as error:  # pragma: no cover
    raise MissingExtraError("runtime.kind: ray", "ray") from error

from practicum.runtime.ray.actor_calls import ask_async
from practicum.runtime.ray.cluster import Cluster
from practicum.runtime.ray.ray_roles import RayRoles, TrainGroup
from practicum.runtime.ray.ray_rollout import ReplicaPools, output_head
from practicum.runtime.ray.replica_pool import ReplicaPool
from practicum.runtime.ray.reward_worker import RewardModelWorker, RewardWorker
from practicum.runtime.ray.rollout_worker import RolloutWorker
from practicum.runtime.ray.teacher_worker import TeacherWorker
from practicum.runtime.ray.train_worker import StudentFacts, TrainWorker
from practicum.runtime.ray.weight_transport import Manifest
from practicum.runtime.ray.worker import RecordingHandle, StoreHandle

CONCURRENT = {"rollout": 1000, "reward": 16, "teachers": 64}
"""Calls that one worker may have under way."""


def start_ray(recipe: Recipe, plan: Plan, watch: Watch, record: RecordPlace | None = None) -> RayRoles:
    """Everyone who takes part, as actors; if that fails, nothing stays behind."""
    with ExitStack() as undo:
        cluster = Cluster.open(recipe, plan)
        undo.callback(cluster.close)
        handle = _start_store(recipe)
        undo.callback(handle.close)
        starter = _Starter(recipe, plan, watch, cluster, handle, record)
        work = starter.everyone()
        group, pools, facts = run_async(
            work, timeout=recipe.runtime.start_s, owner="the start of all workers"
        )
        assert facts.version == 0
        latest = starter.student, starter.teachers
        roles = RayRoles(recipe, plan, watch, cluster, handle, group, pools, facts, *latest)
        roles.begin()
        undo.pop_all()
        return roles


def _start_store(recipe: Recipe) -> StoreHandle:
    runtime = recipe.runtime
    if runtime.store.kind == "ray":
        return start_ray_store(runtime.start_s)
    chosen = runtime.store
    return start_transferqueue(
        chosen.units, chosen.backend, chosen.options, unit_gb=chosen.unit_gb, start_s=runtime.start_s
    )


class _Starter:
    """Starts the workers of a run, and restarts those that died."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        watch: Watch,
        cluster: Cluster,
        handle: StoreHandle,
        record: RecordPlace | None,
    ) -> None:
        self.recipe, self.plan, self.watch, self.cluster, self.handle = recipe, plan, watch, cluster, handle
        self.record = record
        # The weights that restarted replicas get: of the student by copy, and of teachers that copy it.
        self.student: dict[int, Manifest] = {}
        self.teachers: dict[str, Manifest] = {}

    async def everyone(self) -> tuple[TrainGroup, ReplicaPools, StudentFacts]:
        """All workers, loading side by side."""
        recipe = self.recipe
        names = [name for name, teacher in recipe.teachers.items() if scores_during_rollout(teacher)]
        if "teachers" not in self.plan:
            names = []
        reward_models = self._reward_models()
        rollout = self._pool("rollout", engine_replicas(recipe), self._rollout)
        reward_workers = recipe.runtime.reward_workers if computes_reward(recipe) or evaluates(recipe) else 0
        reward = self._pool("reward", reward_workers, partial(self._reward, reward_models))
        teachers = {
            name: self._pool(f"teachers.{name}", _replicas(recipe, name), partial(self._teacher, name))
            for name in names
        }
        learners = [self._learner(rank) for rank in range(data_parallel(recipe))]
        group = TrainGroup(learners, self.watch, recipe.runtime.stage_s)
        pools = ReplicaPools(rollout, reward, teachers)
        start_s = recipe.runtime.start_s
        starts = rollout.start(start_s), reward.start(start_s), self._loaded(reward_models)
        facts, *_ = await gather_all((self._begin(group, teachers), *starts))
        assert facts is not None
        return group, pools, facts

    async def _begin(self, group: TrainGroup, teachers: dict[str, ReplicaPool]) -> StudentFacts:
        """The learner needs its teachers' output heads before it can begin, if it compares all of them."""
        await gather_all(pool.start(self.recipe.runtime.start_s) for pool in teachers.values())
        heads = {}
        if self.recipe.distill is not None and self.recipe.distill.signal == "full":
            heads = {
                name: await output_head(pool, self.recipe.runtime.start_s) for name, pool in teachers.items()
            }
        first = group.workers[0].meeting_point.remote()
        meeting = await self._ask(first, group.names[0])
        calls = [w.begin.remote(meeting, list(heads), *heads.values()) for w in group.workers]
        named_calls = zip(calls, group.names, strict=True)
        return (await gather_all(self._ask(call, name) for call, name in named_calls))[0]

    def _pool(self, role: str, count: int, make: Callable[..., Any]) -> ReplicaPool:
        return ReplicaPool(role, make, count, self.recipe.runtime.max_deaths, self.watch.report)

    def _learner(self, rank: int) -> Any:
        return self._actor(
            TrainWorker, "train", rank, self.recipe, self._handle("train", rank), self.plan, rank
        )

    async def _rollout(self, number: int) -> Any:
        actor = self._actor(RolloutWorker, "rollout", number, self.recipe, self._handle("rollout", number))
        return await self._begun(actor, f"rollout {number}", dict(self.student))

    async def _reward(self, reward_models: dict[str, list[Any]], number: int) -> Any:
        # Colocated models are woken one at a time, by one call at a time.
        waits = any(not scores_during_rollout(model) for model in self.recipe.reward.models.values())
        options = {"max_concurrency": 1} if waits else {}
        handle = self._handle("reward", number)
        actor = self._actor(RewardWorker, "reward", number, self.recipe, handle, **options)
        return await self._begun(actor, f"reward {number}", reward_models)

    async def _teacher(self, name: str, number: int) -> Any:
        role = f"teachers.{name}"
        actor = self._actor(TeacherWorker, role, number, self.recipe, self._handle(role, number), name)
        return await self._begun(actor, f"{role} {number}", self.teachers.get(name))

    def _reward_models(self) -> dict[str, list[Any]]:
        """Reward models with their own resources."""
        workers: dict[str, list[Any]] = {}
        for name, spec in self.recipe.reward.models.items():
            if spec.url is None and has_own_process(spec.placement):
                role, count = f"reward.models.{name}", own_options(spec).replicas
                more = {"max_restarts": self.recipe.runtime.max_deaths, "max_task_retries": -1}
                workers[name] = [
                    self._actor(RewardModelWorker, role, number, self.recipe, name, **more)
                    for number in range(count)
                ]
        return workers

    async def _loaded(self, reward_models: dict[str, list[Any]]) -> None:
        """Until all reward models are loaded."""
        calls = {
            f"reward.models.{name} {number}": actor.begin.remote()
            for name, actors in reward_models.items()
            for number, actor in enumerate(actors)
        }
        await gather_all(self._ask(call, who) for who, call in calls.items())

    def _handle(self, role: str, number: int) -> StoreHandle:
        """How a worker comes to the store; with a record, it writes its part of it."""
        if self.record is None:
            return self.handle
        return RecordingHandle(self.handle, replace(self.record, role=role, number=number))

    def _actor(self, kind: type, role: str, number: int, *args: Any, **options: Any) -> Any:
        """Start an actor in its place of the cluster; it is loading when this returns."""
        concurrent = CONCURRENT.get(role.split(".")[0], 1)
        options = self.cluster.options(role, number) | {"max_concurrency": concurrent} | options
        actor = ray.remote(kind).options(**options).remote(*args)
        self.cluster.register(actor, f"{role} {number}")
        return actor

    async def _begun(self, actor: Any, who: str, *args: Any) -> Any:
        """The actor when it can take work; one that can't is ended."""
        try:
            await self._ask(actor.begin.remote(self.plan, *args), who)
        except BaseException:
            ray.kill(actor)
            raise
        return actor

    async def _ask(self, call: Any, who: str) -> Any:
        timeout = self.recipe.runtime.start_s
        return await ask_async(call, timeout=timeout, owner="the start", who=who)


def _replicas(recipe: Recipe, name: str) -> int:
    teacher = recipe.teachers[name]
    return 1 if teacher.url is not None else own_options(teacher).replicas
