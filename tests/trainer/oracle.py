"""What a run with a lag must equal: a synchronous trainer over the same parts that keeps old weights."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import wraps
from random import Random
from typing import Any

import pytest
from torch import Tensor

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.engines.hosted_engine import HostedEngine
from practicum.engines.torch.make_torch import TorchKind
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.learning.learner import Learner
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.rollout import RolloutRole
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import make_plan
from practicum.roles.student import UpdateReport
from practicum.roles.teachers import TeacherRole
from practicum.runtime.local import LocalRoles, start_local
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.stream import make_stream
from practicum.trainer.sample_step import TRAIN, StepSampler

Weights = dict[str, Tensor]


def weights_of(roles: LocalRoles) -> tuple[Any, int]:
    learner = roles.rank.student.learner
    return {name: x.detach().clone() for name, x in learner.named_weights()}.items(), learner.version


def train_late(recipe: Recipe, lag: int) -> tuple[list[dict[str, float]], Weights]:
    """The update's metrics of each step, and the last weights: step t is sampled by weights t - lag.
    Everything is in this process, one after the other."""
    plan, watch, reports = make_plan(recipe), Watch(recipe.checks, print), []
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        engines_in_threads(patch)
        roles = stack.enter_context(closing(start_local(recipe, plan, watch)))
        sampler = StepSampler(recipe, plan, roles, make_stream(recipe.tasks, recipe.seed))
        kept = [weights_of(roles)]
        for t in range(recipe.train.steps):
            roles.engine.load_weights(*kept[max(0, t - lag)])
            sampled = sampler.begin(t + 1)
            sampler.sample(sampled)
            step = StepInfo(sampled.batch, t + 1, sampled.baselines, roles.rollout.prompts)
            if "teachers" in plan:
                roles.refresh_copies(t + 1)
                roles.stages["teachers"](step)
            if "pad" in plan and (padding := roles.stages["pad"](step)) is not None:
                step = replace(step, batch=BatchRef.concat([step.batch, padding]))
            stages = [stage.name for stage in plan.learner_stages()]
            if recipe.critic is not None and t < recipe.critic.warmup_steps:
                stages.remove("update_student")
            found = [roles.stages[stage](step) for stage in stages]
            updates = [report.metrics for report in found if isinstance(report, UpdateReport)]
            reports.append(updates[0] if updates else {})
            kept.append(weights_of(roles))
            roles.store.clear(TRAIN)
            roles.rollout.forget(sampled.rows())
        return reports, dict(kept[-1][0])


def engines_in_threads(patch: pytest.MonkeyPatch) -> None:
    """Engines work in this process, as on accelerators: a process of their own takes seconds to start."""
    patch.setattr(TorchKind, "hosts_lag", False)


def delay_everything(patch: pytest.MonkeyPatch, seed: int, most: float = 0.02) -> None:
    """Engine, tools, teachers, rewards, learner and the handing over of weights take random times."""
    delays = Random(seed)

    def late(owner: type, name: str, share: float = 1.0) -> None:
        whole = getattr(owner, name)

        @wraps(whole)
        async def delayed_async(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(share * most * delays.random())
            return await whole(*args, **kwargs)

        @wraps(whole)
        def delayed(*args: Any, **kwargs: Any) -> Any:
            time.sleep(share * most * delays.random())
            return whole(*args, **kwargs)

        patch.setattr(owner, name, delayed_async if asyncio.iscoroutinefunction(whole) else delayed)

    late(TorchEngine, "generate")
    late(HostedEngine, "generate")
    late(Toolbox, "run")
    late(TeacherRole, "score")
    late(RolloutRole, "reward", share=5)
    late(Learner, "update", share=5)
    late(LocalRoles, "_give", share=5)
