"""One training step, from prompts to new weights. Read `StepRunner.step` first.

A step is a chain of stages. Which of them run, and what they read and write, is the plan's to say
(`dataplane/plan.py`); where they run is the roles' (`runtime/`). This module holds keys and tags only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

from practicum.checks import invariants
from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.plan import Plan
from practicum.engines.protocol import Sampling
from practicum.errors import PracticumError
from practicum.recipe.algorithm_traits import ESTIMATORS
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.optimizer_steps import balance_metrics, padding_rows_needed
from practicum.runtime.roles import Roles
from practicum.sessions.attempts import Attempt
from practicum.tasks.prompts import Prompt
from practicum.tasks.stream import PromptStream
from practicum.teachers.ledger import TeacherMeasures, make_ledger
from practicum.trainer.buffer import Group, ReplayBuffer, TakenGroups, groups_of
from practicum.trainer.step_metrics import prefixed, rollout_metrics, session_tags, trajectories

TRAIN = "train"
T = TypeVar("T")


class StepRunner:
    """Runs steps over a set of roles. Its state is the prompt stream and the replay buffer."""

    def __init__(self, recipe: Recipe, plan: Plan, roles: Roles, stream: PromptStream, watch: Watch) -> None:
        self.recipe, self.plan, self.roles, self.stream = recipe, plan, roles, stream
        self.watch = watch
        self.buffer = ReplayBuffer(recipe.buffer, TRAIN, recipe.agent.on_failure)
        self.on_stage: Callable[[str], None] = lambda name: None
        self.on_batch: Callable[[BatchRef], None] = lambda batch: None
        self.learnt: tuple[int, dict[str, float]] | None = None
        """The step under way and its metrics so far, once its update is done and can't be undone."""
        self._seconds: dict[str, float] = {}
        self._parts: dict[str, list[float]] = {}

    def step(self, number: int) -> dict[str, float]:
        """Practise, judge, learn, and leave the store as it was. Returns the step's metrics."""
        began = time.perf_counter()
        self._seconds, self._parts, self.learnt = {}, {}, None
        self.watch.fired.clear()
        roles, supervised = self.roles, "demonstrate" in self.plan

        if "teachers" in self.plan:
            roles.refresh_copies(number)
        batch, baselines, metrics = self._demonstrations() if supervised else self._practise()
        metrics |= self._teach(batch)
        batch, filled = self._fill_up(batch, number)
        metrics |= filled
        self._run("old_logprobs", lambda: roles.old_logprobs(batch))
        self._run("ref_logprobs", lambda: roles.ref_logprobs(batch))
        self._run("values", lambda: roles.values(batch))
        advantage = self._run("advantages", lambda: roles.advantages(batch, baselines))
        learnt = self._run("update_critic", lambda: roles.update_critic(batch, number))
        metrics |= prefixed("critic", learnt or {})
        if not self._critic_warms_up(number):
            learnt = self._run("update_student", lambda: roles.update_student(batch, number))
            assert learnt is not None
            metrics |= prefixed("train", learnt.metrics)
            metrics |= self._ledger(batch, learnt.measured)
        metrics |= _advantage_metrics(advantage or {})
        self.learnt = number, metrics
        self._run("sync", roles.sync_weights)
        self._run("clear", lambda: self._clear(batch))

        metrics |= roles.incidents()
        metrics |= {f"checks/{name}": count for name, count in self.watch.fired.items()}
        metrics |= {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        if (rolled := self._seconds.get("rollout")) and "rollout/tokens" in metrics:
            metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / rolled
        return metrics | {"time/step": time.perf_counter() - began}

    def _demonstrations(self) -> tuple[BatchRef, dict[int, float], dict[str, float]]:
        prompts = self.stream.take(self.recipe.train.prompts)
        batch = self._run("demonstrate", lambda: self.roles.practice.demonstrate(prompts, TRAIN))
        assert batch is not None
        self.on_batch(batch)
        return batch, {}, {"epoch": prompts[0].epoch}

    def _practise(self) -> tuple[BatchRef, dict[int, float], dict[str, float]]:
        """Roll out and judge until enough complete groups are there, and take the oldest."""
        wanted = self.recipe.train.prompts
        rolled: list[BatchRef] = []
        groups: list[Group] = []
        refills, epoch = -1, None
        while len(self.buffer) < wanted and refills < self.recipe.buffer.max_refills:
            prompts = self.stream.take(wanted - len(self.buffer))
            epoch = prompts[0].epoch if epoch is None else epoch
            rolled.append(self._roll_out(prompts))
            new = groups_of(rolled[-1])
            groups += new
            self._forget([key for group in self.buffer.add(new) for key, _ in group.rows])
            refills += 1
            if not self.recipe.buffer.filter_flat_groups:
                break
        taken = self.buffer.take(wanted)
        self._forget(taken.spent)
        batch, lost = self._with_baseline(taken)
        if not batch:
            raise PracticumError(nothing_left(groups, refills))
        if not any(tags.sampled_tokens for tags in batch.tags):
            raise PracticumError("the student sampled no token in this step: the loop adds only given ones")
        metrics = rollout_metrics([t for part in rolled for t in session_tags(part)], groups)
        metrics |= {f"reward/part/{name}": fmean(scores) for name, scores in self._parts.items()}
        left = trajectories(BatchRef.concat(rolled))
        if left is not None and left != 1:
            metrics["rollout/trajectories"] = left
        if self.recipe.agent.on_failure == "drop_group":
            metrics["groups/dropped"] = sum(group.has_failed for group in groups)
        metrics["epoch"] = epoch or 0
        if self.recipe.buffer.filter_flat_groups:
            lacking = wanted - len({key.prompt for key in batch.keys})
            metrics |= {"groups/refills": refills, "groups/short": lacking}
        return batch, taken.baselines, metrics | lost

    def _with_baseline(self, taken: TakenGroups) -> tuple[BatchRef, dict[str, float]]:
        """ReMax can't learn from a group whose greedy session failed: it is left out and counted."""
        if not ESTIMATORS[self.recipe.algorithm.advantage].greedy_baseline:
            return taken.batch, {}
        batch = taken.batch.where(lambda key, _: key.prompt in taken.baselines)
        lost = {key for key in taken.batch.keys if key.prompt not in taken.baselines}
        self._forget(list(lost))
        return batch, {"groups/without_baseline": len({key.prompt for key in lost})}

    def _roll_out(self, prompts: list[Prompt]) -> BatchRef:
        """Rollout and reward of these prompts; gives the rows with their rewards in the tags."""
        practice, recipe = self.roles.practice, self.recipe
        attempts = training_attempts(recipe, prompts, self.roles.stop)
        rolled = self._run("rollout", lambda: practice.rollout(attempts, TRAIN, seed=recipe.seed))
        assert rolled is not None
        baseline = ESTIMATORS[recipe.algorithm.advantage].greedy_baseline
        self.watch("weight_version", invariants.weight_version(rolled, self.roles.version))
        self.watch("groups", invariants.groups(rolled, recipe.rollout.samples + baseline))
        done = rolled.where(lambda _, tags: tags.status == "ready")
        parts = self._run("reward", lambda: practice.reward(done)) or {}
        for name, scores in parts.items():
            self._parts.setdefault(name, []).extend(scores)
        batch = self.roles.store.batch(TRAIN, rolled.keys)
        self.on_batch(batch)
        return batch

    def _teach(self, batch: BatchRef) -> dict[str, float]:
        """The teachers score what they have not scored during the rollout."""
        self._run("teachers", lambda: self.roles.teach(batch))
        hidden = self.roles.practice.take_hidden_share() if "teachers" in self.plan else None
        return {} if hidden is None else {"teachers/hidden": hidden}

    def _fill_up(self, batch: BatchRef, number: int) -> tuple[BatchRef, dict[str, float]]:
        """Add rows that do nothing, as many as ranks and mini-batches need to be cut evenly."""
        if "pad" not in self.plan:
            return batch, {}
        lacking = padding_rows_needed(self.recipe, batch, number, self.roles.ranks)
        if lacking:
            padding = self._run("pad", lambda: self.roles.pad(TRAIN, lacking))
            assert padding is not None
            batch = BatchRef.concat([batch, padding])
        metrics = {"padding/rows": lacking, "padding/share": lacking / len(batch)}
        return batch, metrics | balance_metrics(self.recipe, batch, number, self.roles.ranks)

    def _ledger(self, batch: BatchRef, measured: TeacherMeasures | None) -> dict[str, float]:
        if "teachers" not in self.plan or measured is None:
            return {}
        ledger = make_ledger(batch.real(), measured, *self.roles.teachers_spent())
        self.watch("teacher_shares", ledger.starved(self.recipe.route.shares))
        return ledger.metrics()

    def _critic_warms_up(self, number: int) -> bool:
        critic = self.recipe.critic
        return critic is not None and number <= critic.warmup_steps

    def _clear(self, batch: BatchRef) -> None:
        self._forget(list(batch.keys))
        held = self.roles.store.size(TRAIN)
        self.watch("store_empty", invariants.store_empty(held, len(self.buffer.keys())))

    def _forget(self, keys: list) -> None:
        if keys:
            self.roles.store.clear(TRAIN, keys)
            self.roles.practice.forget(keys)

    def _run(self, name: str, work: Callable[[], T]) -> T | None:
        """Run a stage if the plan has it, and keep its time."""
        if name not in self.plan:
            return None
        self.on_stage(name)
        began = time.perf_counter()
        try:
            return work()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began


def training_attempts(recipe: Recipe, prompts: list[Prompt], stop: frozenset[int]) -> list[Attempt]:
    """The sessions of each prompt; ReMax adds a greedy one as the baseline."""
    rollout = recipe.rollout
    drawn = Sampling(
        max_new_tokens=rollout.max_new_tokens,
        stop=stop,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
    )
    attempts = [Attempt(p, i, drawn) for p in prompts for i in range(rollout.samples)]
    if ESTIMATORS[recipe.algorithm.advantage].greedy_baseline:
        greedy = Sampling(max_new_tokens=rollout.max_new_tokens, stop=stop, greedy=True)
        attempts += [Attempt(p, rollout.samples, greedy, is_baseline=True) for p in prompts]
    return attempts


def nothing_left(groups: Sequence[Group], refills: int) -> str:
    """Why a step has nothing to learn from."""
    failures = [tags.failure for group in groups for _, tags in group.rows if tags.failure]
    again = f" after {refills} refills" if refills else ""
    if failures:
        failed = f"{len(failures)} sessions failed, the first: {failures[0]}"
        return f"no group to learn from is left{again}: {failed}"
    return (
        f"no group to learn from is left{again}: rewards are all equal (the task is "
        "too easy or too hard for this model); see samples.jsonl"
    )


def _advantage_metrics(stats: Mapping[str, Any]) -> dict[str, float]:
    stats = dict(stats)
    out = {"groups/of_one": stats.pop("groups_of_one")} if "groups_of_one" in stats else {}
    stats.pop("flat_groups", None)  # groups/flat says it, before any filter
    return out | prefixed("advantage", stats)
