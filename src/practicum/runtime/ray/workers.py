"""The workers of a run on Ray: ranks of the learner, teachers, reward workers and reward models.

Rollout replicas are in `rollout_worker`. A worker's `__init__` does nothing that may fail, because Ray keeps
only the words of an error there: `begin` loads the models.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from practicum.checks.watch import Watch
from practicum.concurrency.event_loop import blocked_by, run_async
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.stages import Plan
from practicum.dataplane.store import StoreHandle
from practicum.devices import pick_device
from practicum.engines.model_cache import make_model_cache
from practicum.learning.parallel import Parallel, free_port
from practicum.models.attention import OutputHead
from practicum.models.load_model import load_model, load_tokenizer, model_facts
from practicum.observe.records.record_files import RecordPlace
from practicum.observe.records.recorder import Recorder
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.recipe.user_functions import take_functions
from practicum.rewards.judge import CannotScore, Judge, JudgeInput
from practicum.rewards.local_judges import load_judge
from practicum.rewards.reward_scorer import RewardScorer, judge_room, load_reward_models, sleeping_models
from practicum.rewards.score_functions import RewardFunctions
from practicum.roles.learner_rank import LearnerRank, set_threads
from practicum.roles.probe_teachers import Questions, Replies
from practicum.roles.reward import RewardRole
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import evaluation_plan
from practicum.roles.sync import PublishedWeights
from practicum.roles.teachers import TeacherRole, read_copy
from practicum.runtime.random_state import seed_generators
from practicum.runtime.ray.actor_calls import ask_async, pack_value, unpack_value
from practicum.runtime.ray.hosts import interface_of
from practicum.runtime.ray.init_ray import enter_folder
from practicum.runtime.ray.weight_transport import Manifest, publish, receive
from practicum.sessions.chat import make_encoder
from practicum.tasks.prompts import Prompt
from practicum.teachers.load_teachers import (
    Teachers,
    connect,
    load_colocated,
    load_teachers,
    make_group,
    signal_width,
)
from practicum.teachers.shared_tokens import shared_tokens

_LATER_S = 5.0
"""Seconds after a model's own deadline."""


class Worker:
    """The base of workers: the recipe, the plan, the store, and torch's threads."""

    LASTING = True
    """True if the run continues without this process, with what it wrote."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        handle: StoreHandle,
        record: RecordPlace | None,
        functions: Mapping[str, Any],
        threads: int | None = None,
    ) -> None:
        """`functions` are those of the driver's script or notebook, which a worker can't import."""
        take_functions(functions)
        # By default the machine's cores are shared among the train pool's devices there.
        cores = max(1, (os.cpu_count() or 1) // recipe.pools.train.devices)
        _set_up(recipe.seed, threads or recipe.runtime.threads or cores)
        self.recipe, self.plan, self.recorder = recipe, plan, Recorder(record)
        self.store = handle.connect(recipe.runtime.store_s, lasting=self.LASTING)

    def blocked(self) -> str | None:
        return blocked_by()

    def pid(self) -> int:
        return os.getpid()


def _set_up(seed: int, threads: int) -> None:
    enter_folder()
    # What users' code draws by itself is the same in every run, as long as nobody dies.
    seed_generators(seed)
    set_threads(threads)


def pack_prompts(prompts: Mapping[Key, Prompt]) -> bytes:
    """Return the prompts of rows as bytes for a worker that has the rows: each prompt once."""
    return pack_value({key.prompt: prompt for key, prompt in prompts.items()})


def _by_row(batch: BatchRef, packed: bytes) -> dict[Key, Prompt]:
    """Return the prompt of each row that has one in `packed`."""
    prompts = unpack_value(packed)
    return {key: prompts[key.prompt] for key in batch.keys if key.prompt in prompts}


class RayLearnerRank(LearnerRank):
    """A rank whose weights go to engines and teachers in other processes."""

    def run(self, stage: str, step: bytes) -> Any:
        """Run a stage with its packed `StepInfo`."""
        return self.stages[stage](unpack_value(step))

    def renew_head(self, name: str, head: OutputHead) -> None:
        assert self.teachers is not None
        self.teachers.renew_head(name, head)

    def publish(self) -> Manifest:
        """Publish the weights for the engines: the first rank's manifest has them. Call all ranks."""
        learner = self.student.learner
        if self.rank == 0:
            return publish(learner.named_weights(), learner.version)
        for _ in learner.named_weights():
            pass  # takes part in gathering each
        return Manifest(learner.version, ())

    def save_published(
        self, manifest: Manifest, fingerprint: Sequence[float], folder: Path, step: int
    ) -> None:
        """Write weights that were published after an earlier step into a checkpoint."""
        received = receive(manifest, timeout=self.recipe.runtime.store_s)
        PublishedWeights.copy(received, manifest.version, fingerprint).save(folder, step)

    def publish_saved(self, folder: Path) -> dict[int, tuple[Manifest, Sequence[float]]]:
        """Publish what `save_published` wrote, by step, each with the learner's fingerprint of then."""
        saved = PublishedWeights.load_all(folder)
        return {
            step: (publish(weights.weights.items(), weights.version), weights.fingerprint)
            for step, weights in saved.items()
        }

    def publish_copy(self, folder: Path, name: str) -> Manifest | None:
        """Publish the weights that a teacher elsewhere, a copy of the student, had saved, if it had. Called
        on one rank, which lives as long as the run: those of a teacher would die with it."""
        path = folder / f"{name}.safetensors"
        if not path.is_file():
            return None
        weights, version = read_copy(path)
        return publish(weights.items(), version)


@dataclass(frozen=True, slots=True)
class RankReply:
    """The result of a call of a rank, and the reports of its checks."""

    value: Any = None
    sentences: tuple[str, ...] = ()
    fired: dict[str, int] = field(default_factory=dict)


class TrainWorker(Worker):
    """A data-parallel rank. All ranks get the same calls with whole batches, and find their rows by tags."""

    LASTING = False

    parallel: Parallel | None = None

    def meeting_point(self) -> tuple[str, int]:
        """Return an address of this rank's machine, and a port that is free on it."""
        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def begin(
        self, rank: int, meeting: tuple[str, int], names: Sequence[str] = (), *heads: OutputHead
    ) -> frozenset[int]:
        """Connect to the other ranks at this address and port, and load the models. Return the stop tokens.
        `heads` are the output heads of the teachers elsewhere of these names."""
        recipe, plan, world = self.recipe, self.plan, self.recipe.data_parallel
        self._sentences: list[str] = []
        self.watch = Watch(recipe.checks, self._sentences.append)
        taught = recipe.teachers.items() if "teachers" in plan else ()
        colocated = {name: teacher for name, teacher in taught if not teacher.scores_during_rollout}
        # Copies of the student, and adapters on its base, need the whole model on every rank.
        whole = world == 1 or any(t.model is None and t.url is None for t in colocated.values())
        model = load_model(recipe.model, recipe.seed, rank=None if whole else rank)
        if world > 1:
            if name := interface_of(ray.util.get_node_ip_address()):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            timeout_s, device = recipe.runtime.stage_s, pick_device(recipe.model.device).type
            self.parallel = Parallel.join(rank, world, *meeting, timeout_s, device)
        teachers = None
        if "teachers" in plan:
            how = recipe.distill, recipe.runtime, recipe.model, recipe.seed
            teachers = load_teachers(colocated, *how, model, heads=dict(zip(names, heads, strict=True)))
        self.roles = RayLearnerRank(
            recipe, plan, self.store, self.watch, model, teachers, self.parallel, self.recorder
        )
        return self.roles.stop

    def call(self, method: Callable[..., Any], *args: Any, **options: Any) -> RankReply:
        value = method(self.roles, *args, **options)
        sentences, fired = tuple(self._sentences), dict(self.watch.fired)
        self._sentences.clear()
        self.watch.fired.clear()
        return RankReply(value, sentences, fired)

    def ask(self, name: str, questions: Questions) -> Replies:
        assert self.roles.teachers is not None
        return self.roles.teachers.ask(name, questions)

    def leave(self) -> None:
        """Disconnect from the other ranks, so that all end well."""
        if self.parallel is not None:
            self.parallel.close()


class TeacherWorker(Worker):
    """One replica of a teacher: a model in this process, or a server."""

    def begin(self, latest: tuple[str, Manifest | None]) -> None:
        """Load the model of this name. For a copy of the student, the manifest has newer weights."""
        recipe, (self.name, manifest) = self.recipe, latest
        spec, distill, source = recipe.teachers[self.name], recipe.distill, recipe.model
        assert distill is not None
        tokenizer = load_tokenizer(source)
        _, vocab = model_facts(source, len(tokenizer))
        # A replica has its own resources: what is `own` elsewhere is in this process here, always awake.
        load = load_colocated if spec.url is None else connect
        self.scorer = load(make_group({self.name: spec}, distill, source, recipe.seed))[self.name]
        self.role = TeacherRole(
            distill,
            self.plan,
            self.store,
            Teachers({self.name: self.scorer}, least_width=signal_width(recipe.teachers, distill, source)),
            tokenizer,
            temperature=recipe.compare_temperature,
            vocab=vocab,
            shared=shared_tokens(recipe, tokenizer),
            recorder=self.recorder,
        )
        if manifest is not None:
            self.take(manifest)

    def score(self, batch: BatchRef, prompts: bytes) -> float:
        """Score rows with these packed prompts, and write the scores. Return the seconds of scoring so
        far."""
        timeout = self.recipe.teachers[self.name].deadline_s
        owner = f"teacher {self.name} ({len(batch)} rows)"
        step = StepInfo(batch, batch.tags[0].step, prompts=_by_row(batch, prompts))
        run_async(self.role.score(step), timeout=timeout, owner=owner)
        return self.scorer.busy_s

    def ask(self, name: str, questions: Questions) -> Replies:
        return self.role.ask(name, questions)

    def describe(self) -> list[str]:
        return [line for part in self.scorer.scorers for line in part.describe()]

    def head(self) -> OutputHead:
        return self.scorer.scorers[0].head()

    def take(self, manifest: Manifest) -> None:
        """Become a copy of the student as these weights are."""
        received = receive(manifest, timeout=self.recipe.runtime.store_s)
        # Copied: what was received is a view of memory that others let go of.
        self.role.take(self.name, {key: x.clone() for key, x in received}, manifest.version)

    def save(self, folder: Path) -> None:
        """Write what it took of the student, for `RayLearnerRank.publish_copy`."""
        self.role.save(folder)


class RewardWorker(Worker):
    """Reads finished sessions from the store, scores them, and writes their rewards. Calls run concurrently,
    if no colocated model takes part."""

    def begin(self, replicas: Mapping[str, Sequence[Any]]) -> None:
        """Load reward functions and models. `replicas` are of models with their own resources."""
        recipe, specs = self.recipe, self.recipe.reward.models
        encoder = make_encoder(recipe, load_tokenizer(recipe.model))
        models: dict[str, RewardScorer] = {}
        if specs and ("reward" in self.plan or recipe.evaluates):
            elsewhere: dict[str, RewardScorer] = {}
            for name, actors in replicas.items():
                judges = [RayJudge(name, actor, specs[name].deadline_s) for actor in actors]
                elsewhere[name] = RewardScorer(name, judges, deadline_s=None)
            models = load_reward_models(specs, judge_room(recipe.rollout), elsewhere)
        residency = make_model_cache(recipe.runtime, sleeping_models(models))
        functions = RewardFunctions(recipe.tasks, recipe.reward)

        def make_role(plan: Plan) -> RewardRole:
            return RewardRole(
                recipe.reward,
                recipe.tasks,
                plan,
                self.store,
                encoder,
                functions,
                models if "reward" in plan else None,
                residency,
                self.recorder,
                deadline_s=recipe.rollout.deadline_s,
                learnt=recipe.uses_reward,
            )

        self._train, self._eval = make_role(self.plan), make_role(evaluation_plan())

    def reward(self, is_eval: bool, batch: BatchRef, prompts: bytes) -> None:
        role = self._eval if is_eval else self._train
        work = role.reward(StepInfo(batch, batch.tags[0].step, prompts=_by_row(batch, prompts)))
        run_async(work, timeout=role.stage_s, owner="reward")


class RewardModelWorker:
    """One replica. It holds no state, so Ray itself starts a dead one again and repeats its calls."""

    def __init__(self, name: str, spec: RewardModel, room: int, seed: int) -> None:
        _set_up(seed, spec.own_options.threads)
        self.name, self.spec, self._room = name, spec, room
        self._judge: Judge | None = None
        self._loading = threading.Lock()

    def begin(self) -> None:
        with self._loading:
            self._judge = self._judge or load_judge(self.name, self.spec, self._room)

    def judge(self, case: JudgeInput) -> float | CannotScore:
        """Return the model's score of a case. A restarted replica loads the model first."""
        self.begin()
        assert self._judge is not None
        scorer = RewardScorer(self.name, [self._judge], deadline_s=self.spec.deadline_s)
        timeout = self.spec.deadline_s + _LATER_S
        return run_async(scorer.judge(case), timeout=timeout, owner=f"reward model {self.name}")


class RayJudge(Judge):
    """Handle of a reward model's replica for reward workers. The cluster stops the replica."""

    def __init__(self, name: str, replica: Any, deadline_s: float) -> None:
        self.name, self._replica, self._deadline_s = name, replica, deadline_s

    async def judge(self, case: JudgeInput) -> float:
        # The replica's own deadline comes first; this one is for a replica that can't answer at all.
        timeout, who = 2 * self._deadline_s, f"reward model {self.name}"
        score = await ask_async(self._replica.judge.remote(case), timeout=timeout, owner=case.name, who=who)
        if isinstance(score, CannotScore):
            raise score
        return score
