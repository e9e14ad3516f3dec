"""Starting a run on Ray: the cluster, the store and the workers, concurrently and within a deadline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from practicum.checks.watch import Watch
from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.dataplane.ray_store.ray_store import start_ray_store
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import StoreHandle
from practicum.dataplane.transferqueue.transferqueue_store import start_transferqueue
from practicum.observe.records.record_files import RecordPlace
from practicum.processes.host import START_S
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.user_functions import passed_functions
from practicum.rewards.reward_scorer import judge_room
from practicum.runtime.ray.actor_calls import ask_async
from practicum.runtime.ray.cluster import Cluster
from practicum.runtime.ray.hosts import check_hosts
from practicum.runtime.ray.placement import TRAIN
from practicum.runtime.ray.ray_roles import RayRoles, TrainGroup
from practicum.runtime.ray.ray_rollout import ReplicaPools, output_head
from practicum.runtime.ray.replica_pool import ReplicaPool
from practicum.runtime.ray.rollout_worker import RolloutWorker
from practicum.runtime.ray.weight_transport import Manifest
from practicum.runtime.ray.workers import RewardModelWorker, RewardWorker, TeacherWorker, TrainWorker, Worker

CONCURRENT = {"rollout": 1000, "reward": 16, "teachers": 64}
"""Calls that one worker may have in flight."""


def start_ray(
    recipe: Recipe, plan: Plan, watch: Watch, record: RecordPlace | None = None, folder: Path | None = None
) -> RayRoles:
    """Start all roles as actors. If that fails, stop those that were started."""
    runtime = recipe.runtime
    with ExitStack() as undo:
        cluster = Cluster.open(recipe, plan)
        undo.callback(cluster.close)
        check_hosts(recipe, folder)
        # With the learner's first rank, whose death ends the run too: no other host is needed as much.
        where = cluster.options(TRAIN)["scheduling_strategy"]
        if runtime.store == "ray":
            handle = start_ray_store(START_S, where=where)
        else:
            handle = start_transferqueue(recipe.pools.train.nodes, start_s=START_S, where=where)
        undo.callback(handle.close)
        starter = _Starter(recipe, plan, watch, cluster, handle, record)
        group, pools, stop = run_async(starter.everyone(), timeout=START_S, owner="the start of all workers")
        latest = {"stop": stop, "student": starter.student, "copies": starter.copies}
        roles = RayRoles(recipe, plan, watch, cluster, handle, group, pools, **latest)
        undo.pop_all()
        return roles


@dataclass
class _Starter:
    """Starts the workers of a run, and restarts those that died. Restarted replicas get the weights in
    `student`, by engine, and in `copies`, of teachers that copy it."""

    recipe: Recipe
    plan: Plan
    watch: Watch
    cluster: Cluster
    handle: StoreHandle
    record: RecordPlace | None
    student: dict[int, Manifest] = field(default_factory=dict)
    copies: dict[str, Manifest] = field(default_factory=dict)

    async def everyone(self) -> tuple[TrainGroup, ReplicaPools, frozenset[int]]:
        """Return the learner's ranks, the replicas, and the tokens that end a response."""
        recipe = self.recipe
        judges: dict[str, list[Any]] = {}
        for name, spec in recipe.reward.models.items():
            if spec.placement_name == "own":
                restarts = {"max_restarts": recipe.runtime.max_deaths, "max_task_retries": -1}
                model = name, spec, judge_room(recipe.rollout), recipe.seed
                judges[name] = [
                    self._actor(RewardModelWorker, f"reward.models.{name}", number, *model, **restarts)
                    for number in range(spec.own_options.replicas)
                ]
        # Colocated reward models are woken one at a time, by one call at a time.
        waits = any(not model.scores_during_rollout for model in recipe.reward.models.values())
        options = {"max_concurrency": 1} if waits else {}
        reward_workers = recipe.runtime.reward_workers if recipe.computes_reward or recipe.evaluates else 0
        start_reward = partial(self._begun, RewardWorker, "reward", lambda: judges, **options)
        start_rollout = partial(self._begun, RolloutWorker, "rollout", lambda: dict(self.student))
        pools = ReplicaPools(
            self._pool("rollout", recipe.engine_replicas, start_rollout),
            self._pool("reward", reward_workers, start_reward),
            {},
        )
        for name, teacher in recipe.teachers.items() if "teachers" in self.plan else ():
            if teacher.scores_during_rollout:
                count = 1 if teacher.url is not None else teacher.own_options.replicas
                role, threads = f"teachers.{name}", teacher.own_options.threads
                latest = partial(lambda name: (name, self.copies.get(name)), name)
                start = partial(self._begun, TeacherWorker, role, latest, threads=threads)
                pools.teachers[name] = self._pool(role, count, start)
        learners = [self._worker(TrainWorker, "train", rank) for rank in range(recipe.data_parallel)]
        group = TrainGroup(learners, self.watch, recipe.runtime.stage_s)
        loading = [self._ask(a.begin.remote(), f"reward.models.{n}") for n in judges for a in judges[n]]
        starts = [pools.rollout.start(), pools.reward.start(), *loading]
        stop, *_ = await gather_all([self._begin_learner(group, pools.teachers), *starts])
        return group, pools, stop

    async def _begin_learner(self, group: TrainGroup, teachers: dict[str, ReplicaPool]) -> frozenset[int]:
        """Start the ranks, which need the teachers' output heads to compare whole distributions."""
        recipe = self.recipe
        await gather_all(pool.start() for pool in teachers.values())
        heads = {}
        if recipe.distill is not None and recipe.distill.signal == "full":
            heads = {name: await output_head(teachers[name], START_S) for name in teachers}
        meeting = await self._ask(group.workers[0].meeting_point.remote(), group.names[0])
        calls = [
            worker.begin.remote(rank, meeting, list(heads), *heads.values())
            for rank, worker in enumerate(group.workers)
        ]
        return (await gather_all(map(self._ask, calls, group.names)))[0]

    def _pool(self, role: str, count: int, make: Callable[[int], Awaitable[Any]]) -> ReplicaPool:
        runtime = self.recipe.runtime
        limits = {"max_deaths": runtime.max_deaths, "start_s": START_S}
        return ReplicaPool(role, make, count, **limits, on_death=self.watch.report)

    def _actor(self, kind: type, role: str, number: int, *args: Any, **options: Any) -> Any:
        """Start an actor in its placement group. It is still loading when this returns."""
        concurrent = CONCURRENT.get(role.split(".")[0], 1)
        options = self.cluster.options(role, number) | {"max_concurrency": concurrent} | options
        actor = ray.remote(kind).options(**options).remote(*args)
        self.cluster.register(actor, f"{role} {number}")
        return actor

    def _worker(
        self, kind: type[Worker], role: str, number: int, threads: int | None = None, **options: Any
    ) -> Any:
        record = None if self.record is None else replace(self.record, role=role, number=number)
        functions = passed_functions(self.recipe.model_dump_json())
        common = self.recipe, self.plan, self.handle, record, functions, threads
        return self._actor(kind, role, number, *common, **options)

    async def _begun(
        self, kind: type[Worker], role: str, latest: Callable[[], Any], number: int, **options: Any
    ) -> Any:
        """Start an actor with the result of `latest`, and return it. Stop it if it can't begin."""
        actor = self._worker(kind, role, number, **options)
        try:
            await self._ask(actor.begin.remote(latest()), f"{role} {number}")
        except BaseException:
            ray.kill(actor)
            raise
        return actor

    async def _ask(self, call: Any, who: str) -> Any:
        return await ask_async(call, timeout=START_S, owner="the start", who=who)
