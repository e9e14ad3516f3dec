"""One training step, from prompts to new weights. Read `StepRunner.step` first.

A step is a chain of stages. Which of them run, what they read and write and who runs them is in the plan
(`roles/stage_table.py`); what they do is in `roles/`, a file for each role; where they run is the runtime's
(`runtime/`). This module holds keys and tags only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

from practicum.checks import invariants
from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.stages import Plan, StepInfo
from practicum.engines.protocol import Sampling
from practicum.errors import PracticumError
from practicum.recipe.algorithm_traits import estimator_traits
from practicum.recipe.derived import recorded_groups
from practicum.recipe.schema.recipe import Recipe
from practicum.records.recorder import Recorder
from practicum.roles.learner_rows import balance_metrics
from practicum.roles.student import UpdateReport
from practicum.roles.teachers import prompts_read, waiting_rows
from practicum.runtime.start_roles import Roles
from practicum.sessions.attempts import Attempt
from practicum.tasks.prompts import Prompt
from practicum.tasks.stream import PromptStream
from practicum.teachers.ledger import make_ledger
from practicum.trainer.buffer import Group, ReplayBuffer, TakenGroups, groups_of
from practicum.trainer.samples import choose_prompts
from practicum.trainer.step_metrics import prefixed, rollout_metrics, session_tags, trajectories

TRAIN = "train"
T = TypeVar("T")
Metrics = dict[str, float]


class StepRunner:
    """Runs steps over a set of roles. Its state is the prompt stream and the replay buffer."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        roles: Roles,
        stream: PromptStream,
        watch: Watch,
        recorder: Recorder | None = None,
    ) -> None:
        self.recipe, self.plan, self.roles, self.stream = recipe, plan, roles, stream
        self.watch = watch
        self.buffer = ReplayBuffer(recipe.buffer, TRAIN, recipe.agent.on_failure)
        self.on_stage: Callable[[str], None] = lambda name: None
        self.on_batch: Callable[[BatchRef], None] = lambda batch: None
        self.learnt: tuple[int, Metrics] | None = None
        """The step under way and its metrics so far, once its update is done and can't be undone."""
        self.on_learnt: Callable[[BatchRef], None] = lambda batch: None
        self._seconds: Metrics = {}
        self._number = self._recorded = 0
        self.recorder = recorder

    def step(self, number: int) -> Metrics:
        """Roll out, score, learn, and leave the store as it was. Returns the step's metrics."""
        began = time.perf_counter()
        self._seconds, self.learnt = {}, None
        self._number, self._recorded = number, 0
        self.watch.fired.clear()

        if "teachers" in self.plan:
            self.roles.refresh_copies(number)
        supervised = "demonstrate" in self.plan
        batch, baselines, metrics = self._demonstrate() if supervised else self._roll_out_and_reward()
        step = StepInfo(batch, number, baselines)
        metrics |= self._teach(step)
        step, padded = self._pad(step)
        metrics |= padded
        for stage in self.plan.learner_stages():  # old_logprobs, … advantages, update_critic, update_student
            metrics |= self._learn(stage.name, step)
        self.learnt = number, metrics
        self.on_learnt(step.batch.real())
        self._run("sync", self.roles.sync_weights)
        self._run("clear", lambda: self._clear(step.batch))
        self.watch.after_step(metrics, step.batch.real())

        metrics |= self.roles.incidents()
        metrics |= {f"checks/{name}": count for name, count in self.watch.fired.items()}
        metrics |= {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        if (rolled := self._seconds.get("rollout")) and "rollout/tokens" in metrics:
            metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / rolled
        return metrics | {"time/step": time.perf_counter() - began}

    def _take(self, count: int) -> list[Prompt]:
        """The next prompts of the stream; each knows its step, and whether its rows are recorded."""
        prompts = self.stream.take(count)
        most = recorded_groups(self.recipe)
        left = None if most is None else max(most - self._recorded, 0)
        chosen = choose_prompts({prompt.uid: prompt.task for prompt in prompts}, left, turn=self._number)
        self._recorded += len(chosen)
        return [replace(p, step=self._number, recorded=p.uid in chosen) for p in prompts]

    def _demonstrate(self) -> tuple[BatchRef, dict[int, float], Metrics]:
        prompts = self._take(self.recipe.train.prompts)
        batch = self._run("demonstrate", lambda: self.roles.rollout.demonstrate(prompts, TRAIN))
        assert batch is not None
        self.on_batch(batch)
        return batch, {}, {"epoch": prompts[0].epoch}

    def _roll_out_and_reward(self) -> tuple[BatchRef, dict[int, float], Metrics]:
        """Roll out and score until enough complete groups are there, and take the oldest."""
        needed = self.recipe.train.prompts
        rolled: list[BatchRef] = []
        groups: list[Group] = []
        refills, epoch = -1, None
        while len(self.buffer) < needed and refills < self.recipe.buffer.max_refills:
            prompts = self._take(needed - len(self.buffer))
            epoch = prompts[0].epoch if epoch is None else epoch
            rolled.append(self._roll_out(prompts))
            new = groups_of(rolled[-1])
            groups += new
            self._forget([key for group in self.buffer.add(new) for key, _ in group.rows])
            refills += 1
            if not self.recipe.buffer.filter_flat_groups:
                break
        taken = self.buffer.take(needed)
        self._forget(taken.spent)
        batch, lost = self._with_baseline(taken)
        if not batch:
            raise PracticumError(nothing_left(groups, refills))
        if not any(tags.sampled_tokens for tags in batch.tags):
            raise PracticumError("the student sampled no token in this step: the loop adds only given ones")
        metrics = self._rollout_metrics(rolled, groups) | {"epoch": epoch or 0}
        if self.recipe.buffer.filter_flat_groups:
            short = needed - len({key.prompt for key in batch.keys})
            metrics |= {"groups/refills": refills, "groups/short": short}
        return batch, taken.baselines, metrics | lost

    def _rollout_metrics(self, rolled: Sequence[BatchRef], groups: Sequence[Group]) -> Metrics:
        metrics = rollout_metrics([tags for batch in rolled for tags in session_tags(batch)], groups)
        left = trajectories(BatchRef.concat(rolled))
        if left is not None and left != 1:
            metrics["rollout/trajectories"] = left
        if self.recipe.agent.on_failure == "drop_group":
            metrics["groups/dropped"] = sum(group.has_failed for group in groups)
        return metrics

    def _with_baseline(self, taken: TakenGroups) -> tuple[BatchRef, Metrics]:
        """Leave out and count the groups whose greedy session failed, if the estimator needs it."""
        if not estimator_traits(self.recipe.algorithm.advantage).greedy_baseline:
            return taken.batch, {}
        batch = taken.batch.where(lambda key, _: key.prompt in taken.baselines)
        lost = {key for key in taken.batch.keys if key.prompt not in taken.baselines}
        self._forget(list(lost))
        return batch, {"groups/without_baseline": len({key.prompt for key in lost})}

    def _roll_out(self, prompts: list[Prompt]) -> BatchRef:
        """Rollout and reward of these prompts; gives the rows with their rewards in the tags."""
        rollout, recipe = self.roles.rollout, self.recipe
        attempts = training_attempts(recipe, prompts, self.roles.stop)
        rolled = self._run("rollout", lambda: rollout.rollout(attempts, TRAIN, seed=recipe.seed))
        assert rolled is not None
        baseline = estimator_traits(recipe.algorithm.advantage).greedy_baseline
        self.watch("weight_version", invariants.weight_version(rolled, self.roles.version))
        self.watch("groups", invariants.groups(rolled, recipe.rollout.samples + baseline))
        done = rolled.where(lambda _, tags: tags.status == "ready")
        self._run("reward", lambda: rollout.reward(done))
        batch = self.roles.store.batch(TRAIN, rolled.keys)
        self.on_batch(batch)
        return batch

    def _teach(self, step: StepInfo) -> Metrics:
        """Colocated teachers score their rows while the engines sleep; others did during the rollout."""
        if "teachers" not in self.plan:
            return {}
        if waiting := waiting_rows(self.recipe, step.batch):
            prompts = prompts_read(self.recipe, waiting, self.roles.rollout.prompts)
            with self.roles.rollout.workers.engines_asleep():
                self._run("teachers", lambda: self.roles.run("teachers", replace(step, prompts=prompts)))
        hidden = self.roles.rollout.hidden.take()
        return {} if hidden is None else {"teachers/hidden": hidden}

    def _pad(self, step: StepInfo) -> tuple[StepInfo, Metrics]:
        """Add rows that do nothing, as many as ranks and mini-batches need to be cut evenly."""
        padding = self._run("pad", lambda: self.roles.run("pad", step))
        if padding is None:
            return step, {}
        batch = BatchRef.concat([step.batch, padding])
        metrics = {"padding/rows": len(padding), "padding/share": len(padding) / len(batch)}
        metrics |= balance_metrics(self.recipe, batch, step.number, self.roles.ranks)
        return replace(step, batch=batch), metrics

    def _learn(self, stage: str, step: StepInfo) -> Metrics:
        """Run a stage of the learner; gives its report as metrics."""
        critic = self.recipe.critic
        if stage == "update_student" and critic is not None and step.number <= critic.warmup_steps:
            return {}
        report = self._run(stage, lambda: self.roles.run(stage, step))
        if isinstance(report, UpdateReport):
            return prefixed("train", report.metrics) | self._ledger(step, report)
        if stage == "advantages":
            return _advantage_metrics(report or {})
        return prefixed({"update_critic": "critic"}.get(stage, stage), report or {})

    def _ledger(self, step: StepInfo, report: UpdateReport) -> Metrics:
        if "teachers" not in self.plan or report.measured is None:
            return {}
        ledger = make_ledger(step.batch.real(), report.measured, *self.roles.teachers_spent())
        self.watch("teacher_shares", ledger.starved(self.recipe.route.shares))
        return ledger.metrics()

    def _clear(self, batch: BatchRef) -> None:
        self._forget(list(batch.keys))
        held = self.roles.store.size(TRAIN)
        self.watch("store_empty", invariants.store_empty(held, len(self.buffer.keys())))

    def _forget(self, keys: list) -> None:
        if keys:
            self.roles.store.clear(TRAIN, keys)
            self.roles.rollout.forget(keys)

    def _run(self, name: str, work: Callable[[], T]) -> T | None:
        """Run a stage if the plan has it, and keep its time."""
        if name not in self.plan:
            return None
        self.on_stage(name)
        began = time.perf_counter()
        try:
            with nullcontext() if self.recorder is None else self.recorder.span(name, self._number):
                return work()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began


def training_attempts(recipe: Recipe, prompts: list[Prompt], stop: frozenset[int]) -> list[Attempt]:
    """The sessions of each prompt, and a greedy one if the advantage estimator needs a baseline."""
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
    if estimator_traits(recipe.algorithm.advantage).greedy_baseline:
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


def _advantage_metrics(statistics: Mapping[str, float]) -> dict[str, float]:
    statistics = dict(statistics)
    metrics = {"groups/of_one": statistics.pop("groups_of_one")} if "groups_of_one" in statistics else {}
    statistics.pop("flat_groups", None)  # groups/flat says it, before any filter
    return metrics | prefixed("advantage", statistics)
