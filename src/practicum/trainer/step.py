"""One training step, from prompts to new weights. Read `StepRunner.step` first.

A step is a chain of stages. Which of them run, what they read and write and who runs them is in the plan
(`roles/stage_table.py`); what they do is in `roles/`, a file for each role; where they run is the runtime's
(`runtime/`). This module holds keys and tags only. A step has two sides: `sample_step.py` samples its batch,
and here it is learnt from. With `async.lag` sampling is some steps ahead (`window.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from practicum.checks import invariants
from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.stages import Plan
from practicum.recipe.algorithm_traits import estimator_traits
from practicum.recipe.derived import lag
from practicum.recipe.schema.recipe import Recipe
from practicum.records.recorder import Recorder
from practicum.roles.padding import balance_metrics
from practicum.roles.run_stage import StepInfo
from practicum.roles.student import UpdateReport
from practicum.roles.teachers import prompts_read, waiting_rows
from practicum.runtime.start_roles import Roles
from practicum.tasks.stream import PromptStream
from practicum.teachers.ledger import make_ledger
from practicum.trainer.sample_step import TRAIN, Metrics, SampledStep, StageTimer, StepSampler
from practicum.trainer.window import Schedule, Window


class StepRunner:
    """Runs steps over a set of roles, in order. Its state is the prompt stream and the window."""

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
        self.schedule = Schedule(lag(recipe), recipe.train.steps)
        self.sampler = StepSampler(recipe, plan, roles, stream, recorder)
        self.window = Window(recipe, self.schedule, roles, self.sampler) if lag(recipe) else None
        self.on_stage: Callable[[str], None] = lambda name: None
        self.on_rolled: Callable[[SampledStep], None] = lambda step: None
        self.learnt: tuple[int, Metrics] | None = None
        """The step under way and its metrics so far, once its update is done and can't be undone."""
        self.on_batch: Callable[[BatchRef], None] = lambda batch: None
        """Told of the batch before the first update: a step that is learnt can't be undone if that fails."""
        self.next_prompt: int | None = None
        """The prompt after the last one of the newest step; None before a step was taken."""
        self._timer = StageTimer(plan, 0, recorder, self.on_stage)
        self.recorder = recorder

    def step(self, number: int) -> Metrics:
        """Sample, learn, and leave the store as it was. Returns the step's metrics."""
        began, self.learnt = time.perf_counter(), None
        self._timer = StageTimer(self.plan, number, self.recorder, self.on_stage)
        self.watch.fired.clear()

        if "teachers" in self.plan:
            self.roles.refresh_copies(number)
        sampled = self._sampled(number)
        step = StepInfo(sampled.batch, number, sampled.baselines)
        metrics = sampled.metrics | self._teach(sampled, step)
        step, padded = self._pad(step)
        metrics |= padded
        stages = [stage.name for stage in self.plan.learner_stages()]
        first_update = next((name for name in stages if name.startswith("update_")), None)
        for name in stages:  # old_logprobs, … advantages, update_critic, update_student
            if name == first_update:
                self.on_batch(step.batch.real())
            metrics |= self._learn(name, step)
        self.learnt = number, metrics
        self._timer.run("sync", lambda: self.roles.publish(number))
        self._timer.run("clear", lambda: self._clear(sampled, step.batch))
        if self.window is not None:
            self.window.move(number)
        self.watch.after_step(metrics, step.batch.real())

        metrics |= self.roles.incidents()
        metrics |= {f"checks/{name}": count for name, count in self.watch.fired.items()}
        seconds = sampled.timer.seconds | self._timer.seconds
        metrics |= {f"time/{name}": spent for name, spent in seconds.items()}
        if (rolled := seconds.get("rollout")) and "rollout/tokens" in metrics:
            metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / rolled
        return metrics | {"time/step": time.perf_counter() - began}

    def stream_state(self, number: int) -> dict[str, int]:
        """The prompt stream's state before a step, of which some prompts may be drawn already."""
        return self.stream.state_dict() if self.window is None else self.window.stream_state(number)

    def restore(self, learnt: int, window: Mapping[str, Any]) -> None:
        """Continue after step `learnt` with what a checkpoint kept of later ones; the store has its rows."""
        done = {Key(*key) for key in window.get("done", [])}
        rewarded = {tuple(name) for name in window.get("rewarded", [])}
        held = self.roles.store.batch(TRAIN)
        kept = [key for key, tags in held if key in done and tags.step > learnt]
        if lost := [key for key in held.keys if key not in set(kept)]:
            self.roles.store.clear(TRAIN, lost)
        steps = {key: tags.step for key, tags in held}
        for copy, rollout in enumerate(self.roles.rollouts):
            own = [key for key in kept if self.schedule.copy_of(steps[key]) == copy]
            rollout.restore(own, rewarded & {key[:2] for key in own})
        if self.schedule.lag:
            self.roles.publish(learnt)

    def close(self) -> None:
        """End the sampling of steps that are under way."""
        if self.window is not None:
            self.window.close()

    def _sampled(self, number: int) -> SampledStep:
        """The step's batch, when it is sampled; what was rolled out is told even if that failed."""
        window, sampler = self.window, self.sampler
        if window is not None:
            self.on_stage("waiting for its sessions")
        sampled = sampler.begin(number, on_stage=self.on_stage) if window is None else window.begin(number)
        try:
            sampler.sample(sampled) if window is None else window.finish(sampled)
        finally:
            self.on_rolled(sampled)
        recipe, expected = self.recipe, self.roles.version_of(sampled.weights)
        sessions = recipe.rollout.samples + estimator_traits(recipe.algorithm.advantage).greedy_baseline
        for batch in sampled.rolled if "rollout" in self.plan else ():
            self.watch("weight_version", invariants.weight_version(batch, expected))
            self.watch("groups", invariants.groups(batch, sessions))
        if "rollout" in self.plan:
            uids, filters = [prompt.uid for prompt in sampled.prompts], recipe.buffer.filter_flat_groups
            found = invariants.drawn(uids, sampled.rolled, sampled.batch, filters=filters)
            self.watch("groups", found)
        self.next_prompt = max(key.prompt for key in sampled.rows()) + 1
        return sampled

    def _teach(self, sampled: SampledStep, step: StepInfo) -> Metrics:
        """Colocated teachers score their rows; others did during the rollout."""
        if "teachers" not in self.plan:
            return {}
        rollout = self.roles.rollouts[sampled.copy]
        if waiting := waiting_rows(self.recipe, step.batch):
            prompts = prompts_read(self.recipe, waiting, rollout.prompts)
            with rollout.engines_asleep():
                self._timer.run(
                    "teachers", lambda: self.roles.run("teachers", replace(step, prompts=prompts))
                )
        hidden = rollout.hidden.take()
        return {} if hidden is None else {"teachers/hidden": hidden}

    def _pad(self, step: StepInfo) -> tuple[StepInfo, Metrics]:
        """Add rows that do nothing, as many as ranks and mini-batches need to be cut evenly."""
        padding = self._timer.run("pad", lambda: self.roles.run("pad", step))
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
        report = self._timer.run(stage, lambda: self.roles.run(stage, step))
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

    def _clear(self, sampled: SampledStep, batch: BatchRef) -> None:
        """Forget the step's rows: those that were learnt from, padding, and those that were left out."""
        keys = list(dict.fromkeys([*sampled.rows(), *batch.keys]))
        self.roles.store.clear(TRAIN, keys)
        self.roles.rollouts[sampled.copy].forget(keys)
        held = [tags for tags in self.roles.store.batch(TRAIN).tags if tags.step <= sampled.number]
        self.watch("store_empty", invariants.store_empty(len(held)))


def _advantage_metrics(statistics: Mapping[str, float]) -> dict[str, float]:
    statistics = dict(statistics)
    metrics = {"groups/of_one": statistics.pop("groups_of_one")} if "groups_of_one" in statistics else {}
    statistics.pop("flat_groups", None)  # groups/flat says it, before any filter
    return metrics | prefixed("advantage", statistics)


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The same numbers under `prefix/`."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
