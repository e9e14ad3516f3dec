"""One training step, from prompts to new weights. Read `StepRunner.step` first.

A step is a chain of stages. The plan (`roles/stage_table.py`) lists the stages to run, their reads and
writes, and the roles that run them. Each stage is a method in the file of `roles/` that the table names, and
the runtime (`runtime/`) decides where it runs. This module holds keys and tags only. `sample_step.py` samples
a step's batch, and this module trains on it.
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
from practicum.dataplane.stages import Plan, StageSpec
from practicum.observe.records.recorder import Recorder
from practicum.recipe.algorithm_traits import estimator_traits
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.run_stage import StepInfo
from practicum.roles.student import UpdateReport
from practicum.roles.teachers import prompts_read
from practicum.runtime.start_roles import Roles
from practicum.teachers.ledger import make_ledger
from practicum.trainer.sample_step import TRAIN, Metrics, SampledStep, StageTimer, StepSampler
from practicum.trainer.window import Window


class StepRunner:
    """Runs steps in order with a set of roles. Its state is that of the sampling side."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        roles: Roles,
        sampling: StepSampler | Window,
        watch: Watch,
        recorder: Recorder | None = None,
        *,
        on_stage: Callable[[str], None] = lambda name: None,
        on_rolled: Callable[[SampledStep], None] = lambda step: None,
        on_batch: Callable[[BatchRef], None] = lambda batch: None,
    ) -> None:
        """`on_rolled` receives each step after sampling, even if sampling failed. `on_batch` receives the
        batch before the first update, because a trained step can't be undone if it raises."""
        self.recipe, self.plan, self.roles, self.sampling = recipe, plan, roles, sampling
        self.watch, self.recorder = watch, recorder
        self.on_stage, self.on_rolled, self.on_batch = on_stage, on_rolled, on_batch
        self.learnt: tuple[int, Metrics] | None = None
        """The current step and its metrics so far, once its update is done."""
        self.next_prompt: int | None = None
        """Index of the next prompt after the newest step, or None before the first step."""

    def step(self, number: int) -> Metrics:
        """Sample, train and clear the store. Return the step's metrics."""
        began, self.learnt = time.perf_counter(), None
        self.watch.fired.clear()
        self.roles.refresh_copies(number)

        sampled = self.sampling.begin(number)
        try:
            self.sampling.sample(sampled)
        finally:
            self.on_rolled(sampled)
        self._check_sampled(sampled)

        distill = self.recipe.distill
        shared = distill is not None and distill.signal == "shared"
        prompts = prompts_read(self.recipe.teachers, sampled.batch, sampled.rollout.prompts, whole=shared)
        if any(stage.use for stage in self.plan):
            prompts = {key: sampled.rollout.prompts[key] for key in sampled.batch.keys}
        step = StepInfo(sampled.batch, number, sampled.baselines, prompts)
        metrics, timer = dict(sampled.metrics), StageTimer(number, self.recorder, self.on_stage)
        stages = {**self.roles.stages, "clear": sampled.rollout.clear}
        chosen = [stage for stage in self.plan if stage.side == "learning" and stage.first_step <= number]
        updates = [stage for stage in chosen if stage.trains]
        for stage in chosen:  # teachers, pad, old_logprobs, … advantages, update_student, sync, clear
            if stage in updates[:1]:
                self.on_batch(step.batch.real())
            with timer.run(stage.name):
                report = stages[stage.name](step)
            step, reported = self._take_report(stage, step, report)
            metrics |= reported
            if stage in updates[-1:]:
                self.learnt = number, metrics
        held = [tags for tags in self.roles.store.batch(TRAIN).tags if tags.step <= number]
        self.watch("store_empty", invariants.store_empty(len(held)))
        self.sampling.move(number)
        self.watch.after_step(metrics, step.batch.real())

        metrics |= self.roles.incidents()
        metrics |= {f"checks/{name}": count for name, count in self.watch.fired.items()}
        seconds = sampled.timer.seconds | timer.seconds
        metrics |= {f"time/{name}": spent for name, spent in seconds.items()}
        if (rolled := seconds.get("rollout")) and "rollout/tokens" in metrics:
            metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / rolled
        return metrics | {"time/step": time.perf_counter() - began}

    def restore(self, learnt: int, window: Mapping[str, Any]) -> None:
        """Continue after step `learnt`, with a checkpoint's state of later steps, whose rows are stored."""
        done = {Key(*key) for key in window.get("done", [])}
        rewarded = {tuple(name) for name in window.get("rewarded", [])}
        held = self.roles.store.batch(TRAIN)
        kept = {key: tags.step for key, tags in held if key in done and tags.step > learnt}
        if lost := [key for key in held.keys if key not in kept]:
            self.roles.store.clear(TRAIN, lost)
        rollouts = self.roles.rollouts
        for copy, rollout in enumerate(rollouts):
            own = [key for key, step in kept.items() if step % len(rollouts) == copy]
            rollout.restore(own, rewarded & {key[:2] for key in own})
        if len(rollouts) > 1:
            self.roles.publish(learnt)

    def _check_sampled(self, sampled: SampledStep) -> None:
        recipe = self.recipe
        self.next_prompt = max(key.prompt for key in sampled.rows()) + 1
        if "rollout" not in self.plan:
            return
        sessions = recipe.rollout.samples + estimator_traits(recipe.algorithm.advantage).greedy_baseline
        for batch in sampled.rolled:
            if not recipe.teachers_answer:
                self.watch("weight_version", invariants.weight_version(batch, sampled.version))
            self.watch("groups", invariants.groups(batch, sessions))
        uids = [prompt.uid for prompt in sampled.prompts]
        filters = recipe.refills > 0 or recipe.teachers_answer
        self.watch("groups", invariants.drawn(uids, sampled.rolled, sampled.batch, filters=filters))

    def _take_report(self, stage: StageSpec, step: StepInfo, report: Any) -> tuple[StepInfo, Metrics]:
        """Return the step for the next stages, and the stage's metrics."""
        if isinstance(report, BatchRef):
            if report:  # otherwise it stays the same object, which workers already have
                step = replace(step, batch=BatchRef.concat([step.batch, report]))
            return step, {"padding/rows": len(report), "padding/share": len(report) / len(step.batch)}
        if not isinstance(report, UpdateReport):
            return step, prefixed(stage.metrics or stage.name, report or {})
        metrics = prefixed(stage.metrics, report.metrics)
        if "teachers" in self.plan and report.measured is not None:
            ledger = make_ledger(step.batch.real(), report.measured, *self.roles.teachers_spent())
            self.watch("teacher_shares", ledger.starved(self.recipe.route.shares))
            metrics |= ledger.metrics()
        return step, metrics


def prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Add `prefix/` to the names without a prefix."""
    return {name if "/" in name else f"{prefix}/{name}": value for name, value in metrics.items()}
