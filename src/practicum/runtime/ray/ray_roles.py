"""The roles of a run on Ray, for the trainer. Calls return keys, tags and numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import ray
from ray import ObjectRef

from practicum.checks.watch import Watch
from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store, StoreHandle
from practicum.errors import PracticumError
from practicum.recipe.schema.recipe import Recipe
from practicum.rewards.score_functions import RewardFunctions
from practicum.roles.learner_rank import Transcript
from practicum.roles.probe_teachers import PROBE_S
from practicum.roles.rollout import RolloutRole
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import evaluation_plan
from practicum.roles.student import UpdateReport
from practicum.roles.sync import SyncProbe, WeightLock
from practicum.roles.teachers import takes_new_weights
from practicum.runtime.ray.actor_calls import WorkerDied, ask, first_death, pack_value
from practicum.runtime.ray.cluster import Cluster
from practicum.runtime.ray.ray_rollout import AskWorker, RayWorkers, ReplicaPools, output_head
from practicum.runtime.ray.rollout_worker import RolloutWorker
from practicum.runtime.ray.weight_transport import Manifest
from practicum.runtime.ray.workers import RankReply, RayLearnerRank, TeacherWorker

P = ParamSpec("P")
T = TypeVar("T")

END_S = 5.0
"""Seconds that workers may take to end by themselves."""
IDLE_S = 60.0
"""Seconds in which ranks that are not in the middle of a stage answer."""
SHARED_BYTES = 2**10
"""Arguments of stages from this size on are one object, which a host gets once for all ranks and stages."""
RARE_COLLECTION = 10_000, 10, 200
"""Thresholds of the garbage collector. Keys and tags have no cycles, and with Python's thresholds a third of
the controller's time goes into looking for some."""
NEWS_S = 5.0
"""Seconds to wait for Ray to report which rank died."""


class TrainGroup:
    """The learner's ranks as one, in order. A rank that dies ends the call immediately with its name."""

    def __init__(self, workers: Sequence[Any], watch: Watch, timeout_s: float) -> None:
        self.workers, self.watch, self.timeout_s = list(workers), watch, timeout_s
        self.names = [f"rank {rank} of {len(workers)} of the learner" for rank in range(len(workers))]

    def __len__(self) -> int:
        return len(self.workers)

    def all(
        self, method: Callable[Concatenate[RayLearnerRank, P], T], *args: P.args, **options: P.kwargs
    ) -> T:
        """Call a method on all ranks with the same arguments. Return the first rank's result."""
        return self._call(self.workers, method, args, options)[0]

    def first(
        self, method: Callable[Concatenate[RayLearnerRank, P], T], *args: P.args, **options: P.kwargs
    ) -> T:
        """Call a method on the first rank alone, with what needs the whole batch in one place."""
        return self._call(self.workers[:1], method, args, options)[0]

    def each(self, method: Callable[[RayLearnerRank], T], timeout_s: float | None = None) -> list[T]:
        return self._call(self.workers, method, timeout_s=timeout_s)

    def _call(
        self,
        workers: Sequence[Any],
        method: Callable[..., T],
        args: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[T]:
        names = self.names[: len(workers)]
        refs: list[ObjectRef[Any]] = [w.call.remote(method, *args, **(options or {})) for w in workers]
        owner = f"stage {args[0]}" if method == RayLearnerRank.run else method.__name__
        try:
            replies = ask(refs, timeout=timeout_s or self.timeout_s, owner=owner, who=names)
        except PracticumError:
            raise
        except Exception as error:  # a rank that lost another one says only that a connection broke
            if (death := first_death(refs, names, timeout=NEWS_S)) is not None:
                raise death from error
            raise
        # Ranks check the same numbers, so the first one's reports are enough.
        first: RankReply = replies[0]
        for sentence in first.sentences:
            self.watch.report(sentence)
        self.watch.fired.update(first.fired)
        return [reply.value for reply in replies]


class ControllerStore:
    """The store as the controller has it: keys and tags, and never a column."""

    def __init__(self, store: Store) -> None:
        self.batch, self.tag, self.clear, self.size = store.batch, store.tag, store.clear, store.size

    def put(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("the controller must not fetch columns: workers do")

    get = save = load = put


class RayRoles:
    """See `start_roles.Roles`. Made by `start_ray`."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        watch: Watch,
        cluster: Cluster,
        handle: StoreHandle,
        group: TrainGroup,
        pools: ReplicaPools,
        *,
        stop: frozenset[int],
        student: dict[int, Manifest],
        copies: dict[str, Manifest],
    ) -> None:
        """Restarted replicas get the weights in `student`, by engine, and in `copies`, of teachers."""
        self.recipe, self.plan, self.cluster, self.handle = recipe, plan, cluster, handle
        self.group, self.pools, self.lag = group, pools, recipe.rollout.lag
        self.stop, self.version, self.ranks = stop, 0, len(group)
        self.student, self.copies = student, copies
        self.published: dict[int, tuple[Manifest, Sequence[float]]] = {}
        """Weights by the step that they are after, each with the learner's fingerprint, if it is checked."""
        engines = range(recipe.sampling_engines)
        self._turns = [WeightLock(recipe.sampling_s, held=0) for _ in engines]
        self.probes = [SyncProbe(recipe.model.dtype, watch) for _ in engines]
        self.store: Store = ControllerStore(handle.connect(recipe.runtime.store_s, lasting=False))
        self.rollouts = self._rollouts(plan, is_eval=False)
        self.eval_rollouts = self._rollouts(evaluation_plan(self.lag), is_eval=True)
        on_ranks = (spec.name for spec in plan if spec.ranks != "controller")
        self.stages: dict[str, Callable[[StepInfo], Any]] = {
            "sync": lambda step: self.publish(step.number),
            **{name: partial(self._run, name) for name in on_ranks},
        }
        if "teachers" in self.stages:
            self.stages["teachers"] = self.rollouts[0].after_rollout(self.stages["teachers"])
        teachers = recipe.teachers.items()
        self._colocated = {name for name, teacher in teachers if not teacher.scores_during_rollout}
        self._copies = [name for name in pools.teachers if recipe.teachers[name].student is not None]
        """Teachers in separate processes that are copies of the student."""
        self._busy_before: dict[str, float] = {}
        self._sent: tuple[StepInfo, Any] | None = None
        """The last argument of a stage, and the same for the ranks, pickled."""
        self._reported, self._thresholds = (0, 0), gc.get_threshold()
        gc.set_threshold(*RARE_COLLECTION)
        for engine in engines:
            self._probe(engine, self._fingerprint)
        if self.lag:
            self.publish(0)

    def _rollouts(self, plan: Plan, *, is_eval: bool) -> list[RolloutRole]:
        recipe, rollouts = self.recipe, []
        functions = RewardFunctions(recipe.tasks, recipe.reward)
        deadlines_s = {name: teacher.deadline_s for name, teacher in recipe.teachers.items()}
        for copy in range(self.lag + 1):
            workers = RayWorkers(
                recipe.rollout,
                self.store,
                self.pools,
                functions,
                deadlines_s,
                stage_s=recipe.runtime.stage_s,
                engine=copy % len(self._turns),
                is_eval=is_eval,
            )
            others = functions, recipe.reward.models, recipe.teachers
            options = {"deadline_s": recipe.rollout.deadline_s}
            rollouts.append(RolloutRole(plan, self.store, workers, *others, **options))
        return rollouts

    def compare_teachers(self) -> tuple[list[str], list[str]]:
        """See `Roles`. A rollout replica compares, and asks teachers where they are."""
        if "teachers" not in self.plan:
            return [], []
        actors = dict.fromkeys(self._colocated, self.group.workers[0])
        actors |= {name: replicas[0] for name, p in self.pools.teachers.items() if (replicas := p.replicas())}
        asks = {name: AskWorker(name, actors[name]) for name in self.recipe.teachers if name in actors}
        pool, timeout = self.pools.rollout, PROBE_S * len(asks)
        work = pool.run(pool.calling(timeout, RolloutWorker.compare_teachers, asks), load=1)
        try:
            found = run_async(work, timeout=timeout + 5, owner="the probe of teachers")
        except WorkerDied as died:  # its pool restarts it
            return [], [f"the teachers are not compared with the student: {died}"]
        self.teachers_spent()  # not the scoring of a step
        return found

    def describe(self) -> list[str]:
        timeout = self.recipe.runtime.stage_s
        lines = self.pools.rollout.call_each(timeout, RolloutWorker.describe)
        for pool in self.pools.teachers.values():
            lines += pool.call_each(timeout, TeacherWorker.describe)
        return [line for sentences in lines for line in sentences]

    def refresh_copies(self, step: int) -> None:
        teachers = self.recipe.teachers.items() if "teachers" in self.plan else ()
        due = {name for name, teacher in teachers if takes_new_weights(teacher, step)}
        if due & self._colocated:
            self.group.all(RayLearnerRank.refresh_copies, step)
        if elsewhere := [name for name in self._copies if name in due]:
            manifest = self.group.all(RayLearnerRank.publish)
            for name in elsewhere:
                self._give(name, manifest)

    def _give(self, name: str, manifest: Manifest) -> None:
        """Send these weights to a copy of the student in separate processes, and to its later replicas."""
        pool, timeout = self.pools.teachers[name], self.recipe.runtime.stage_s
        self.copies[name] = manifest
        pool.call_each(timeout, TeacherWorker.take, manifest)
        if self.recipe.distill is not None and self.recipe.distill.signal == "full":
            owner = f"the output head of teacher {name}"
            head = run_async(output_head(pool, timeout), timeout=timeout + 5, owner=owner)
            self.group.all(RayLearnerRank.renew_head, name, head)

    def _run(self, stage: str, step: StepInfo) -> Any:
        call = self.group.all if self.plan[stage].ranks == "all" else self.group.first
        if self._sent is None or self._sent[0] is not step:
            # Otherwise Ray would pickle it for each rank and stage, and send it to a host as often.
            packed = pack_value(step)
            self._sent = step, packed if len(packed) < SHARED_BYTES else ray.put(packed)
        report = call(RayLearnerRank.run, stage, self._sent[1])
        if isinstance(report, UpdateReport):
            self.version = report.version
        return report

    def teachers_spent(self) -> tuple[dict[str, float], dict[str, int]]:
        """See `Roles`. Ranks score their rows apart from each other: seconds add up, wakes do not."""
        seconds, wakes = dict.fromkeys(self.recipe.teachers, 0.0), dict.fromkeys(self.recipe.teachers, 0)
        if self._colocated:
            for rank_seconds, rank_wakes in self.group.each(RayLearnerRank.teachers_spent):
                for name in self._colocated:
                    seconds[name] += rank_seconds[name]
                    wakes[name] = max(wakes[name], rank_wakes[name])
        for name, by_process in self.pools.busy_s.items():
            so_far = sum(by_process.values())
            seconds[name] += so_far - self._busy_before.get(name, 0.0)
            self._busy_before[name] = so_far
        return seconds, wakes

    def publish(self, step: int) -> None:
        manifest = self.group.all(RayLearnerRank.publish)
        if not self.lag:
            self._load(0, manifest)
            self._probe(0, self._fingerprint)
            return
        probe = self.probes[0]
        fingerprint = self._fingerprint(probe.length) if probe.looks else ()
        kept = {old: weights for old, weights in self.published.items() if old >= step - self.lag}
        self.published = kept | {step: (manifest, fingerprint)}

    def weights(self, copy: int, step: int) -> AbstractContextManager[None]:
        if not self.lag:
            return nullcontext()
        engine = copy % len(self._turns)

        def load() -> None:
            manifest, fingerprint = self.published[step]
            self._load(engine, manifest)
            self._probe(engine, lambda _: fingerprint)

        return self._turns[engine].use(step, load)

    def version_of(self, step: int) -> int:
        return self.published[step][0].version if self.lag else self.version

    def _load(self, engine: int, manifest: Manifest) -> None:
        """Give this engine of every replica these weights. Replicas that are restarted later get them too."""
        self.student[engine], self.pools.versions[engine] = manifest, manifest.version
        self.pools.rollout.call_each(self.recipe.runtime.stage_s, RolloutWorker.load, engine, manifest)

    def _probe(self, engine: int, learner: Callable[[int], Sequence[float]]) -> None:
        if self.probes[engine].looks:
            timeout = self.recipe.runtime.stage_s
            fingerprints = self.pools.rollout.call_each(timeout, RolloutWorker.fingerprint, engine)
            self.probes[engine].check(fingerprints, learner)

    def _fingerprint(self, length: int) -> Sequence[float]:
        return self.group.all(RayLearnerRank.fingerprint, length)

    def transcripts(self, batch: BatchRef) -> list[Transcript]:
        return self.group.first(RayLearnerRank.transcripts, batch) if batch else []

    def session_advantages(self, batch: BatchRef) -> dict[tuple[int, ...], float]:
        return self.group.first(RayLearnerRank.session_advantages, batch)

    def kl_state(self) -> dict[str, float]:
        return self.group.first(RayLearnerRank.kl_state)

    def updates(self) -> tuple[int, ...]:
        counts = self.group.each(RayLearnerRank.updates, IDLE_S)
        return tuple(count for theirs in counts for count in theirs)

    def save(self, folder: Path, rows: Collection[Key]) -> None:
        folder = folder.absolute()
        self.group.all(RayLearnerRank.save, folder, rows)
        for step, (manifest, fingerprint) in self.published.items():
            if (step, manifest.version) != (max(self.published), self.version):  # else they are the student's
                where = folder / "sampling"
                self.group.first(RayLearnerRank.save_published, manifest, fingerprint, where, step)
        timeout = self.recipe.runtime.stage_s
        for name in self._copies:
            pool = self.pools.teachers[name]
            work = pool.run(pool.calling(timeout, TeacherWorker.save, folder / "teachers"), load=1)
            run_async(work, timeout=timeout + 5, owner=f"save of {pool.role}")

    def load(self, folder: Path, kl_state: Mapping[str, float]) -> None:
        folder = folder.absolute()
        self.version = self.group.all(RayLearnerRank.load, folder, dict(kl_state))
        for name in self._copies:
            manifest = self.group.first(RayLearnerRank.publish_copy, folder / "teachers", name)
            if manifest is not None:
                self._give(name, manifest)
        if self.lag:
            self.published = self.group.first(RayLearnerRank.publish_saved, folder / "sampling")
            for turns in self._turns:
                turns.held = None
        else:
            self.publish(0)

    def export(self, folder: Path) -> None:
        self.group.all(RayLearnerRank.export, folder.absolute())

    def incidents(self) -> dict[str, Any]:
        pools = self.pools.pools()
        before, self._reported = self._reported, (sum(p.deaths for p in pools), sum(p.reruns for p in pools))
        counts = zip(("cluster/deaths", "cluster/reruns"), before, self._reported, strict=True)
        return {name: now - then for name, then, now in counts if now > then}

    def close(self) -> None:
        gc.set_threshold(*self._thresholds)
        with ExitStack() as stack:
            stack.callback(self.cluster.close)
            stack.callback(self.handle.close)
            if len(self.group) > 1:
                stack.callback(self._leave)
            # First the replicas: one that is being restarted would start after the end of all others.
            work = gather_all(pool.close() for pool in self.pools.pools())
            stack.callback(run_async, work, timeout=END_S, owner="the end of the replicas")

    def _leave(self) -> None:
        """Disconnect the ranks from each other if they are still alive."""
        calls = [worker.leave.remote() for worker in self.group.workers]
        try:
            ask(calls, timeout=END_S, owner="the end of the ranks", who=self.group.names)
        except PracticumError:
            return
