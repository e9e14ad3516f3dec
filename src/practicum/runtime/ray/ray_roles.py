"""All roles of a run on Ray, as the trainer sees them: calls go out, keys, tags and numbers come back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from practicum.checks.watch import Watch
from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.plan import Plan, evaluation_plan
from practicum.dataplane.store import Store
from practicum.errors import PracticumError
from practicum.recipe.derived import scores_during_rollout
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.student import UpdateReport
from practicum.roles.sync import SyncProbe
from practicum.roles.teachers import takes_new_weights
from practicum.runtime.ray.actor_calls import ask_async
from practicum.runtime.ray.cluster import Cluster
from practicum.runtime.ray.controller_store import ControllerStore
from practicum.runtime.ray.ray_rollout import RayRolloutRole, ReplicaPools, output_head
from practicum.runtime.ray.replica_pool import ReplicaPool
from practicum.runtime.ray.train_group import TrainGroup, spread
from practicum.runtime.ray.train_worker import StudentFacts
from practicum.runtime.ray.weight_transport import Manifest
from practicum.runtime.ray.worker import StoreHandle

END_S = 5.0
"""Seconds that workers may take to end by themselves."""
IDLE_S = 60.0
"""Seconds in which ranks that are not in the middle of a stage answer."""


class RayRoles:
    """See `roles.Roles`. Made by `start.start_ray`."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        watch: Watch,
        cluster: Cluster,
        handle: StoreHandle,
        group: TrainGroup,
        crew: ReplicaPools,
        facts: StudentFacts,
        latest: dict[str, Manifest],
    ) -> None:
        """`latest` holds the weights that replicas start with again: of the student, and of its copies."""
        self.recipe, self.plan, self.cluster, self.handle = recipe, plan, cluster, handle
        self.group, self.crew, self.latest = group, crew, latest
        self.stop, self.version, self.ranks = facts.stop, facts.version, len(group)
        self.store: Store = ControllerStore(handle.connect(recipe.runtime.store_s, lasting=False), group)
        self.practice = RayRolloutRole(recipe, plan, self.store, crew, exam=False)
        self.examiner = RayRolloutRole(recipe, evaluation_plan(), self.store, crew, exam=True)
        self._colocated = {
            name for name, teacher in recipe.teachers.items() if not scores_during_rollout(teacher)
        }
        self._spent: tuple[dict[str, float], dict[str, int]] = {}, {}
        self._busy_before: dict[str, float] = {}
        self._told = (0, 0)
        self.probe = SyncProbe(recipe, watch)

    def describe(self) -> list[str]:
        told: list[str] = []
        for role, pool in {"rollout": self.crew.rollout, **self.crew.teachers}.items():
            for sentences in self._each(pool, "describe", who=f"a worker of {role}"):
                told += sentences
        return told

    def refresh_copies(self, step: int) -> None:
        due = [name for name, teacher in self.recipe.teachers.items() if takes_new_weights(teacher, step)]
        if any(name in self._colocated for name in due):
            self.group.all("refresh_copies", step)
        elsewhere = [name for name in due if name not in self._colocated]
        if elsewhere:
            manifest = self.group.all("publish")
            for name in elsewhere:
                self._give(name, manifest)

    def _give(self, name: str, manifest: Manifest) -> None:
        """A copy of the student with resources of its own takes these weights, and so do later replicas."""
        self.latest[name] = manifest
        self._each(self.crew.teachers[name], "take", manifest, who=f"teacher {name}")
        if self.recipe.distill is not None and self.recipe.distill.signal == "full":
            timeout, owner = self.recipe.runtime.stage_s, f"the output head of teacher {name}"
            head = run_async(output_head(self.crew.teachers[name], timeout), timeout=timeout + 5, owner=owner)
            self.group.all("renew_head", name, head)

    def teach(self, batch: BatchRef) -> None:
        waiting = batch.where(lambda _, tags: tags.teacher in self._colocated)
        if not waiting:
            return
        tokens = [tags.prompt_tokens + tags.response_tokens for tags in waiting.tags]
        parts = [waiting.take(rows) for rows in spread(tokens, self.ranks)]
        asked = {name for name in self._colocated if self.recipe.teachers[name].before is not None}
        args = []
        for part in parts:
            prompts = {key: self.practice.prompts[key] for key, tags in part if tags.teacher in asked}
            args.append((part, prompts))
        self._rest(asleep=True)
        try:
            answers = self.group.each("score", args)
        finally:
            self._rest(asleep=False)
        seconds, wakes = self._spent
        for theirs_s, theirs_w in answers:
            for name, spent in theirs_s.items():
                seconds[name] = seconds.get(name, 0.0) + spent
            for name, count in theirs_w.items():
                wakes[name] = max(wakes.get(name, 0), count)

    def _rest(self, *, asleep: bool) -> None:
        work = self.practice.rest(asleep=asleep)
        run_async(work, timeout=self.recipe.runtime.stage_s, owner="the engines")

    def teachers_spent(self) -> tuple[dict[str, float], dict[str, int]]:
        seconds, wakes = self._spent
        self._spent = {}, {}
        for name, by_process in self.crew.busy_s.items():
            so_far = sum(by_process.values())
            seconds[name] = seconds.get(name, 0.0) + so_far - self._busy_before.get(name, 0.0)
            self._busy_before[name] = so_far
        return {name: seconds.get(name, 0.0) for name in self.recipe.teachers}, {
            name: wakes.get(name, 0) for name in self.recipe.teachers
        }

    def pad(self, partition: str, count: int) -> BatchRef:
        return self.group.first("pad", partition, count)

    def old_logprobs(self, batch: BatchRef) -> None:
        self.group.all("old_logprobs", batch)

    def ref_logprobs(self, batch: BatchRef) -> None:
        self.group.all("ref_logprobs", batch)

    def values(self, batch: BatchRef) -> None:
        self.group.all("values", batch)

    def advantages(self, batch: BatchRef, baselines: Mapping[int, float]) -> dict[str, float]:
        return self.group.first("advantages", batch, dict(baselines))

    def update_critic(self, batch: BatchRef, step: int) -> dict[str, float]:
        return self.group.all("update_critic", batch, step)

    def update_student(self, batch: BatchRef, step: int) -> UpdateReport:
        learnt, self.version = self.group.all("update_student", batch, step)
        return learnt

    def sync_weights(self) -> None:
        manifest: Manifest = self.group.all("publish")
        self.latest["student"] = manifest
        self.crew.version = manifest.version
        self._each(self.crew.rollout, "load", manifest, who="a rollout worker")
        self.probe_weights()

    def probe_weights(self) -> None:
        """Whether the engines have the learner's weights."""
        if self.probe.looks:
            found = self._each(self.crew.rollout, "fingerprint", who="a rollout worker")
            self.probe.check(found, lambda length: self.group.all("fingerprint", length))

    def _each(self, pool: ReplicaPool, method: str, *args: Any, who: str) -> list[Any]:
        """Call every replica, and those too that are being started again; their answers in order."""
        work, timeout = self._calling(method, args, who), self.recipe.runtime.stage_s
        return run_async(pool.each(work), timeout=timeout + 5, owner=f"{method} on every replica")

    def _one(self, pool: ReplicaPool, method: str, *args: Any, who: str) -> None:
        """Call some replica."""
        work, timeout = self._calling(method, args, who), self.recipe.runtime.stage_s
        run_async(pool.run(work, load=1), timeout=timeout + 5, owner=f"{method} on a replica")

    def _calling(self, method: str, args: tuple[Any, ...], who: str) -> Callable[[Any], Awaitable[Any]]:
        async def work(worker: Any) -> Any:
            call = getattr(worker, method).remote(*args)
            timeout = self.recipe.runtime.stage_s
            return await ask_async(call, timeout=timeout, owner="the controller", who=who)

        return work

    def texts(self, batch: BatchRef) -> list[tuple[str, str]]:
        return self.group.first("texts", batch) if batch else []

    def kl_state(self) -> dict[str, float]:
        return self.group.first("kl_state")

    def updates(self) -> tuple[int, ...]:
        counts = self.group.each("updates", [()] * self.ranks, timeout_s=IDLE_S)
        return tuple(count for theirs in counts for count in theirs)

    def save(self, folder: Path, *, rows: bool = True) -> None:
        self.group.all("save", folder.absolute(), rows)
        for name in self._copies():
            self._one(self.crew.teachers[name], "save", folder.absolute() / "teachers", who=f"teacher {name}")

    def load(self, folder: Path, kl_state: Mapping[str, float]) -> None:
        self.version = self.group.all("load", folder.absolute(), dict(kl_state))
        for name in self._copies():
            manifest = self.group.first("publish_copy", folder.absolute() / "teachers", name)
            if manifest is not None:
                self._give(name, manifest)
        self.sync_weights()

    def _copies(self) -> list[str]:
        """Teachers with resources of their own that are copies of the student."""
        return [name for name in self.crew.teachers if self.recipe.teachers[name].student is not None]

    def export(self, folder: Path) -> None:
        self.group.all("export", folder.absolute())

    def incidents(self) -> dict[str, Any]:
        deaths = sum(pool.deaths for pool in self.crew.pools())
        reruns = sum(pool.reruns for pool in self.crew.pools())
        before, self._told = self._told, (deaths, reruns)
        counts = {"cluster/deaths": deaths - before[0], "cluster/reruns": reruns - before[1]}
        return {name: count for name, count in counts.items() if count}

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.cluster.close)
            stack.callback(self.handle.close)
            stack.callback(self._leave)
            stack.callback(self._dismiss)

    def _dismiss(self) -> None:
        """End the replicas: one that was just being started again would come after the end of all others."""
        work = gather_all(pool.close() for pool in self.crew.pools())
        run_async(work, timeout=END_S, owner="the end of the replicas")

    def _leave(self) -> None:
        """Ranks take leave of each other, if they still can; the cluster ends them anyway."""
        if len(self.group) > 1:
            try:
                self.group.timeout_s = END_S
                self.group.all("leave")
            except PracticumError:
                return
