"""Call each user-supplied function once before a run, on a small synthetic batch, and check its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from practicum.algorithms.advantages import AdvantageInputs
from practicum.algorithms.divergences import Buckets
from practicum.algorithms.losses import PolicyInputs
from practicum.checks.watch import CHECKS
from practicum.concurrency.event_loop import run_async
from practicum.errors import RecipeError
from practicum.recipe.algorithm_traits import ESTIMATORS, LOSSES, estimator_traits
from practicum.recipe.own_parts import GUIDE, PARTS, find_part, short_name
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Recipe, Train
from practicum.recipe.schema.teacher_sections import Distill
from practicum.recipe.text.type_text import choices
from practicum.recipe.user_functions import split_function
from practicum.rewards.score_functions import RewardFunctions, RewardSample
from practicum.tasks.messages import prompt_text
from practicum.tasks.stream import make_stream
from practicum.user_code import short_repr

_SESSION_N = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
_RESPONSE = "a made-up response"


def check_parts(recipe: Recipe) -> list[str]:
    """Try the user's parts, and return a message. Raise RecipeError for an unusable part."""
    parts = list(parts_of(recipe))
    for kind, name in parts:
        about = PARTS[kind]
        if fault := _try(kind, find_part(kind, name), recipe.algorithm, recipe.train, recipe.distill):
            raise RecipeError(about.key, f"{name!r}, which returned {fault}", about.expected, GUIDE)
    names = [short_name(use) for use in recipe.checks.own]
    if twice := [name for name in names if name in CHECKS or names.count(name) > 1]:
        found = f"a second check named {twice[0]}"
        raise RecipeError("checks.own", found, "different names", "rename one of the functions")
    shown = ", ".join(f"{PARTS[kind].key} {name.rpartition('/')[2]}" for kind, name in parts)
    return [f"custom parts, each called once: {shown}"] if parts else []


def parts_of(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield kind and name of the user's parts that a recipe runs, except tasks and stages."""
    algorithm, train, distill = recipe.algorithm, recipe.train, recipe.distill
    if recipe.has_advantage_estimator and algorithm.advantage not in ESTIMATORS:
        yield "advantage", algorithm.advantage
    if recipe.has_policy_loss and algorithm.loss not in LOSSES:
        yield "policy_loss", algorithm.loss
    chosen: list[tuple[str, Any, str]] = [("aggregation", algorithm, "aggregation")]
    chosen += [("kl_estimator", algorithm.kl, "estimator")] if algorithm.kl.place != "off" else []
    if distill is not None:
        kind = "sampled_divergence" if distill.signal == "sampled" else "divergence"
        chosen.append((kind, distill, "divergence"))
    chosen += [("schedule", train, "schedule"), ("optimizer", train, "optimizer")]
    for kind, section, key in chosen:
        if getattr(section, key) not in choices(type(section).model_fields[key].annotation):
            yield kind, getattr(section, key)
    yield from (("check", use) for use in recipe.checks.own)
    yield from (("tracker", name) for name in recipe.track.to if split_function(name))


def try_rewards(recipe: Recipe) -> list[str]:
    """Score a made-up response to a prompt of each task. Raise RewardError if a function fails."""
    rewards, findings = RewardFunctions(recipe.tasks, recipe.reward), []
    for name, task in recipe.tasks.items():
        specs = recipe.rewards_of(name)
        if not specs:
            continue
        stream = make_stream({name: task}, recipe.seed, needs_answer=recipe.tasks_needing_answer)
        samples = [
            RewardSample(
                prompt_text=prompt_text(prompt.content),
                response_text=_RESPONSE,
                answer=prompt.answer,
                row=prompt.row,
                task=name,
                domain=prompt.domain,
                finish="stop",
                key=f"{_RESPONSE} to {prompt}",
                response_tokens=3,
                turns=(_RESPONSE,),
            )
            # With a single sample, a wrong result of a batch function could look right.
            for prompt in stream.take(1 if rewards.divides(name) else 2)
        ]
        seconds = sum(spec.timeout_s for spec in specs) + 5.0
        result, *_ = run_async(rewards.score(samples), timeout=seconds, owner=f"rewards of tasks.{name}")
        parts = ", ".join(f"{part} {value:g}" for part, value in result.parts.items())
        findings.append(f"tasks.{name}: rewards of {_RESPONSE}: {result.failure or parts}")
    return findings


def _try(
    kind: str, call: Callable[..., Any], algorithm: Algorithm, train: Train, distill: Distill | None
) -> str | None:
    """Call a part of this kind. Return a description of a wrong result, or None."""
    random = torch.Generator().manual_seed(0)
    values_N, others_N = (torch.randn(len(_SESSION_N), generator=random) for _ in range(2))
    leaf, mask_N = values_N.clone().requires_grad_(), _SESSION_N >= 0
    match kind:
        case "advantage":
            traits = estimator_traits(algorithm.advantage)
            result = call(
                AdvantageInputs(
                    token_rewards_N=values_N,
                    mask_N=mask_N,
                    session_N=_SESSION_N,
                    group_S=torch.tensor([0, 0, 1, 1]),
                    baseline_S=torch.zeros(4) if traits.greedy_baseline else None,
                    values_N=others_N if traits.critic else None,
                    gamma=algorithm.gamma,
                    lam=algorithm.lam,
                    parts_S={name: values_N[:4] for name in ("checker", "other")},
                )
            )
            names = ["advantages_N", "returns_N"] if traits.critic else ["advantages_N"]
            return next(filter(None, (_fault(result, name, values_N) for name in names)), None)
        case "policy_loss":
            clips = algorithm.clip_low, algorithm.clip_high
            result = call(PolicyInputs(leaf, values_N - 0.1, others_N, mask_N, _SESSION_N, *clips))
            return _fault(result, "loss_N", leaf)
        case "kl_estimator" | "sampled_divergence":
            through_loss = distill is not None and distill.apply_as == "loss"
            in_loss = algorithm.kl.place == "loss" if kind == "kl_estimator" else through_loss
            given = leaf if in_loss else values_N
            return _fault(call(given), "", given)
        case "divergence":
            assert distill is not None
            p, q = (torch.softmax(values.double().view(2, -1), -1) for values in (values_N, others_N))
            terms = call(Buckets(p.requires_grad_().log() - q.log(), p, q, distill.beta))
            if fault := _fault(terms, "value", p):
                return fault
            (slope,) = torch.autograd.grad(terms.value.sum(), p)
            # A term that is equal for all buckets cancels in the student's gradient.
            gap = terms.pull - p * slope
            off = float((gap - p * gap.sum(-1, keepdim=True)).detach().abs().max())
            return None if off < 1e-6 else f"a pull that differs from p d(value)/dp by {off:.2g}"
        case "aggregation":
            tokens_S = torch.tensor([2, 3, 4])
            divisors = call(tokens_S, tokens_S)
            is_good = isinstance(divisors, Tensor) and divisors.shape == tokens_S.shape
            return None if is_good and bool((divisors > 0).all()) else "no positive divisor for each session"
        case "schedule":
            rate = call(train.warmup_steps + 1, train)
            is_good = isinstance(rate, int | float) and math.isfinite(rate) and rate >= 0
            return None if is_good else f"{short_repr(rate)} at step {train.warmup_steps + 1}"
        case "optimizer":
            parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))]
            optimizer = call(parameters, train)
            if not isinstance(optimizer, torch.optim.Optimizer):
                return f"{short_repr(optimizer)}, not an optimizer"
            before = [{**group, "params": None, "lr": None} for group in optimizer.param_groups]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            if before == [{**group, "params": None, "lr": None} for group in optimizer.param_groups]:
                return None
            return "one with state in its groups, which no checkpoint holds: it must be in state[p]"
    return None


def _fault(result: Any, name: str, given: Tensor) -> str | None:
    """Check that a result, or its attribute `name`, has one number for each of `given`, and describe a fault.
    If `given` requires a gradient, the result must too."""
    values, name = (getattr(result, name, None), name) if name else (result, "its result")
    if not isinstance(values, Tensor) or values.shape != given.shape or not values.is_floating_point():
        return f"{short_repr(values)} as {name} for a float tensor of shape {list(given.shape)}"
    if not values.isfinite().all():
        return f"{name} that is not finite"
    if given.requires_grad and not values.requires_grad:
        return f"{name} without a gradient to its input"
    return None
