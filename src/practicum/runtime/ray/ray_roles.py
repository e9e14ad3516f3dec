"""All roles of a run on Ray, as the trainer sees them: calls go out, keys, tags and numbers come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from ray import ObjectRef

from practicum.checks.watch import Watch
from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import Store
from practicum.errors import PracticumError
from practicum.recipe.derived import lag, sampling_engines, sampling_s, scores_during_rollout
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.rollout import RolloutRole
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import evaluation_plan
from practicum.roles.student import UpdateReport
from practicum.roles.sync import SyncProbe
from practicum.roles.teachers import takes_new_weights
from practicum.roles.transcripts import Transcript
from practicum.roles.weight_turns import WeightTurns
from practicum.runtime.ray.actor_calls import ask, first_death
from practicum.runtime.ray.cluster import Cluster
from practicum.runtime.ray.ray_rollout import RayWorkers, ReplicaPools, output_head
from practicum.runtime.ray.replica_pool import ReplicaPool
from practicum.runtime.ray.train_worker import StudentFacts
from practicum.runtime.ray.weight_transport import Manifest
from practicum.runtime.ray.worker import RankReply, StoreHandle

END_S = 5.0
"""Seconds that workers may take to end by themselves."""
IDLE_S = 60.0
"""Seconds in which ranks that are not in the middle of a stage answer."""
NEWS_S = 5.0
"""Seconds in which Ray tells of a death that the other ranks have felt already."""


class TrainGroup:
    """The learner's ranks as one, in order. A rank that dies ends the call at once with its name."""

    def __init__(self, workers: Sequence[Any], watch: Watch, timeout_s: float) -> None:
        self.workers, self.watch, self.timeout_s = list(workers), watch, timeout_s
        self.names = [f"rank {rank} of {len(workers)} of the learner" for rank in range(len(workers))]

    def __len__(self) -> int:
        return len(self.workers)

    def all(self, method: str, *args: Any) -> Any:
        """Call a method of all ranks, or of their roles, alike; the first one's answer is everybody's."""
        return self.each(method, [args] * len(self))[0]

    def first(self, method: str, *args: Any) -> Any:
        """Call the first rank alone, with what needs the whole batch in one place."""
        return self.each(method, [args])[0]

    def each(self, method: str, args: Sequence[tuple[Any, ...]], timeout_s: float | None = None) -> list[Any]:
        """Call as many ranks as there are arguments, each with its own; their answers in order."""
        workers, names = self.workers[: len(args)], self.names[: len(args)]
        refs: list[ObjectRef[Any]] = [
            worker.call.remote(method, *own) for worker, own in zip(workers, args, strict=True)
        ]
        owner = f"stage {args[0][0]}" if method == "run" else method
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
        """Reading and writing columns, and saving and loading them, is the workers': here it is a bug."""
        raise AssertionError("the controller asked its store for columns: a worker does that")

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
        facts: StudentFacts,
        student: dict[int, Manifest],
        copies: dict[str, Manifest],
    ) -> None:
        """Restarted replicas get the weights in `student`, by engine, and in `copies`, of teachers."""
        self.recipe, self.plan, self.cluster, self.handle = recipe, plan, cluster, handle
        self.group, self.pools, self.lag = group, pools, lag(recipe)
        self.student, self.copies = student, copies
        self.published: dict[int, tuple[Manifest, Sequence[float]]] = {}
        """Weights by the step that they are after, each with the learner's fingerprint, if it is checked."""
        self._engines = range(sampling_engines(recipe))
        """Those of each replica."""
        self._turns = [WeightTurns(sampling_s(recipe), held=0) for _ in self._engines]
        self.stop, self.version, self.ranks = facts.stop, facts.version, len(group)
        self.store: Store = ControllerStore(handle.connect(recipe.runtime.store_s, lasting=False))
        self.rollouts = [self._rollout(plan, copy, is_eval=False) for copy in range(self.lag + 1)]
        evaluation = evaluation_plan()
        self.eval_rollouts = [self._rollout(evaluation, copy, is_eval=True) for copy in range(self.lag + 1)]
        self._colocated = {
            name for name, teacher in recipe.teachers.items() if not scores_during_rollout(teacher)
        }
        self._busy_before: dict[str, float] = {}
        self._reported = (0, 0)
        self.probes = [SyncProbe(recipe, watch) for _ in self._engines]

    def begin(self) -> None:
        """Everyone is there: check that the engines have the learner's weights."""
        for engine in self._engines:
            self._probe(engine, lambda length: self.group.all("fingerprint", length))
        if self.lag:
            self.publish(0)

    def _rollout(self, plan: Plan, copy: int, *, is_eval: bool) -> RolloutRole:
        engine = copy % len(self._engines)
        workers = RayWorkers(self.recipe, self.store, self.pools, engine=engine, is_eval=is_eval)
        return RolloutRole(self.recipe, plan, self.store, workers)

    def describe(self, planned: float | None = None) -> list[str]:
        lines: list[str] = [*self.group.all("describe_memory", planned)]
        for pool in (self.pools.rollout, *self.pools.teachers.values()):
            for sentences in self._each(pool, "describe"):
                lines += sentences
        return lines

    def refresh_copies(self, step: int) -> None:
        due = [name for name, teacher in self.recipe.teachers.items() if takes_new_weights(teacher, step)]
        if any(name in self._colocated for name in due):
            self.group.all("teachers.refresh", step)
        elsewhere = [name for name in due if name not in self._colocated]
        if elsewhere:
            manifest = self.group.all("publish")
            for name in elsewhere:
                self._give(name, manifest)

    def _give(self, name: str, manifest: Manifest) -> None:
        """A copy of the student with its own resources takes these weights, and so do later replicas."""
        self.copies[name] = manifest
        self._each(self.pools.teachers[name], "take", manifest)
        if self.recipe.distill is not None and self.recipe.distill.signal == "full":
            timeout, owner = self.recipe.runtime.stage_s, f"the output head of teacher {name}"
            head = run_async(
                output_head(self.pools.teachers[name], timeout), timeout=timeout + 5, owner=owner
            )
            self.group.all("teachers.renew_head", name, head)

    def run(self, stage: str, step: StepInfo) -> Any:
        call = self.group.all if self.plan[stage].ranks == "all" else self.group.first
        report = call("run", stage, step)
        if isinstance(report, UpdateReport):
            self.version = report.version
        return report

    def teachers_spent(self) -> tuple[dict[str, float], dict[str, int]]:
        """Ranks score their rows apart from each other: their seconds add up, their wakes do not."""
        seconds, wakes = dict.fromkeys(self.recipe.teachers, 0.0), dict.fromkeys(self.recipe.teachers, 0)
        if self._colocated:
            for rank_seconds, rank_wakes in self.group.each("teachers.spent", [()] * self.ranks):
                for name in self._colocated:
                    seconds[name] += rank_seconds[name]
                    wakes[name] = max(wakes[name], rank_wakes[name])
        for name, by_process in self.pools.busy_s.items():
            so_far = sum(by_process.values())
            seconds[name] += so_far - self._busy_before.get(name, 0.0)
            self._busy_before[name] = so_far
        return seconds, wakes

    def publish(self, step: int) -> None:
        manifest: Manifest = self.group.all("publish")
        if not self.lag:
            self._load(0, manifest)
            self._probe(0, lambda length: self.group.all("fingerprint", length))
            return
        looks = self.probes[0].looks
        length = self.probes[0].length
        fingerprint: Sequence[float] = self.group.all("fingerprint", length) if looks else ()
        kept = {old: weights for old, weights in self.published.items() if old >= step - self.lag}
        self.published = kept | {step: (manifest, fingerprint)}

    def weights(self, copy: int, step: int) -> AbstractContextManager[None]:
        if not self.lag:
            return nullcontext()
        engine = copy % len(self._engines)

        def load() -> None:
            manifest, fingerprint = self.published[step]
            self._load(engine, manifest)
            self._probe(engine, lambda _: fingerprint)

        return self._turns[engine].use(step, load)

    def version_of(self, step: int) -> int:
        return self.published[step][0].version if self.lag else self.version

    def _load(self, engine: int, manifest: Manifest) -> None:
        """This engine of every replica takes these weights; replicas that are restarted later too."""
        self.student[engine], self.pools.versions[engine] = manifest, manifest.version
        self._each(self.pools.rollout, "load", engine, manifest)

    def _probe(self, engine: int, learner: Callable[[int], Sequence[float]]) -> None:
        """Check that an engine's weights are the learner's, in every replica."""
        if self.probes[engine].looks:
            fingerprints = self._each(self.pools.rollout, "fingerprint", engine)
            self.probes[engine].check(fingerprints, learner)

    def _each(self, pool: ReplicaPool, method: str, *args: Any) -> list[Any]:
        """Call every replica, those that are being restarted too; their answers in order."""
        timeout = self.recipe.runtime.stage_s
        work = pool.each(pool.calling(method, *args, timeout=timeout))
        return run_async(work, timeout=timeout + 5, owner=f"{method} on every replica")

    def _one(self, pool: ReplicaPool, method: str, *args: Any) -> None:
        """Call some replica."""
        timeout = self.recipe.runtime.stage_s
        work = pool.run(pool.calling(method, *args, timeout=timeout), load=1)
        run_async(work, timeout=timeout + 5, owner=f"{method} on a replica")

    def transcripts(self, batch: BatchRef) -> list[Transcript]:
        return self.group.first("transcripts", batch) if batch else []

    def session_advantages(self, batch: BatchRef) -> dict[tuple[int, ...], float]:
        return self.group.first("session_advantages", batch)

    def kl_state(self) -> dict[str, float]:
        return self.group.first("kl_state")

    def updates(self) -> tuple[int, ...]:
        counts = self.group.each("updates", [()] * self.ranks, timeout_s=IDLE_S)
        return tuple(count for theirs in counts for count in theirs)

    def save(self, folder: Path, *, rows: bool = True) -> None:
        self.group.all("save", folder.absolute(), rows)
        for step, (manifest, fingerprint) in self.published.items():
            if (step, manifest.version) != (max(self.published), self.version):  # else they are the student's
                where = folder.absolute() / "sampling"
                self.group.first("save_published", manifest, fingerprint, where, step)
        for name in self._copies():
            self._one(self.pools.teachers[name], "save", folder.absolute() / "teachers")

    def load(self, folder: Path, kl_state: Mapping[str, float]) -> None:
        self.version = self.group.all("load", folder.absolute(), dict(kl_state))
        for name in self._copies():
            manifest = self.group.first("publish_copy", folder.absolute() / "teachers", name)
            if manifest is not None:
                self._give(name, manifest)
        if self.lag:
            self.published = self.group.first("publish_saved", folder.absolute() / "sampling")
            for turns in self._turns:
                turns.forget()
        else:
            self.publish(0)

    def _copies(self) -> list[str]:
        """Teachers with their own resources that are copies of the student."""
        return [name for name in self.pools.teachers if self.recipe.teachers[name].student is not None]

    def export(self, folder: Path) -> None:
        self.group.all("export", folder.absolute())

    def incidents(self) -> dict[str, Any]:
        deaths = sum(pool.deaths for pool in self.pools.pools())
        reruns = sum(pool.reruns for pool in self.pools.pools())
        before, self._reported = self._reported, (deaths, reruns)
        counts = {"cluster/deaths": deaths - before[0], "cluster/reruns": reruns - before[1]}
        return {name: count for name, count in counts.items() if count}

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.cluster.close)
            stack.callback(self.handle.close)
            stack.callback(self._leave)
            stack.callback(self._dismiss)

    def _dismiss(self) -> None:
        """End the replicas: one that is being restarted would start after the end of all others."""
        work = gather_all(pool.close() for pool in self.pools.pools())
        run_async(work, timeout=END_S, owner="the end of the replicas")

    def _leave(self) -> None:
        """Ranks disconnect from each other, if they still can; the cluster ends them anyway."""
        if len(self.group) > 1:
            try:
                calls = [worker.leave.remote() for worker in self.group.workers]
                ask(calls, timeout=END_S, owner="the end of the ranks", who=self.group.names)
            except PracticumError:
                return
