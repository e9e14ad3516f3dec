"""A user's own parts before a run: each is found, and tried on made-up numbers; `practicum check` runs it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from practicum.algorithms.advantages.types import AdvantageInputs, AdvantageResult
from practicum.algorithms.distill.types import Buckets, BucketTerms
from practicum.algorithms.policy_losses.types import PolicyInputs, PolicyTerms
from practicum.errors import RecipeError
from practicum.recipe.algorithm_traits import ESTIMATORS, LOSSES, estimator_traits
from practicum.recipe.derived import has_advantage_estimator, has_policy_loss
from practicum.recipe.own_parts import GUIDE, PARTS, find_part, guarded, short_name
from practicum.recipe.schema.algorithm_sections import Algorithm, Kl
from practicum.recipe.schema.recipe import Checks, Recipe, Train
from practicum.recipe.schema.teacher_sections import Distill
from practicum.recipe.text.type_text import choices
from practicum.user_code import repr_of, type_name

Try = Callable[[Callable[..., Any], Recipe], str | None]
"""Tries a part; gives what is wrong with it, to follow its name, or None."""
_SESSION_N = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
_TOKENS = len(_SESSION_N)
_TRIED_STEPS = 1000


def check_parts(recipe: Recipe) -> list[str]:
    """What was found, in a sentence; a part that can't be used is a RecipeError."""
    shown = []
    for kind, name in parts_of(recipe):
        part = find_part(kind, name)
        if kind in _TRIES and (wrong := _TRIES[kind](part, recipe)):
            raise RecipeError(PARTS[kind].key, f"{name!r}, which {wrong}", PARTS[kind].expected, GUIDE)
        shown.append(f"{PARTS[kind].key} {name.rpartition('/')[2]}")
    _check_names(recipe)
    return [f"parts of your own that can be used: {', '.join(shown)}"] if shown else []


def parts_of(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Kind and name of each part of the user's that runs in a recipe; tasks and the plan find theirs."""
    algorithm, train = recipe.algorithm, recipe.train
    if has_advantage_estimator(recipe) and algorithm.advantage not in ESTIMATORS:
        yield "advantage", algorithm.advantage
    if has_policy_loss(recipe) and algorithm.loss not in LOSSES:
        yield "policy_loss", algorithm.loss
    if algorithm.aggregation not in _builtin(Algorithm, "aggregation"):
        yield "aggregation", algorithm.aggregation
    if algorithm.kl.place != "off" and algorithm.kl.estimator not in _builtin(Kl, "estimator"):
        yield "kl_estimator", algorithm.kl.estimator
    if recipe.distill is not None and recipe.distill.divergence not in _builtin(Distill, "divergence"):
        sampled = recipe.distill.signal == "sampled"
        yield "sampled_divergence" if sampled else "divergence", recipe.distill.divergence
    for kind in ("schedule", "optimizer"):
        if (name := getattr(train, kind)) not in _builtin(Train, kind):
            yield kind, name
    yield from (("check", check.use) for check in recipe.checks.own)
    yield from (("tracker", name) for name in recipe.track.own)


def _builtin(section: Any, key: str) -> list[str]:
    return choices(section.model_fields[key].annotation)


def _check_names(recipe: Recipe) -> None:
    names = [short_name(check.use) for check in recipe.checks.own]
    for name in names:
        if name in Checks.model_fields or names.count(name) > 1:
            found = f"a second check named {name}"
            raise RecipeError("checks.own", found, "a name of its own", "call its function something else")


def _made_up(seed: int = 0) -> Tensor:
    return torch.randn(_TOKENS, generator=torch.Generator().manual_seed(seed))


def _advantage(estimate: Callable[..., Any], recipe: Recipe) -> str | None:
    algorithm = recipe.algorithm
    traits = estimator_traits(algorithm.advantage)
    estimated = estimate(
        AdvantageInputs(
            token_rewards_N=_made_up(),
            mask_N=torch.tensor([True, False, *[True] * (_TOKENS - 2)]),
            session_N=_SESSION_N,
            group_S=torch.tensor([0, 0, 1, 1]),
            baseline_S=torch.zeros(4) if traits.greedy_baseline else None,
            values_N=_made_up(1) if traits.critic else None,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            whiten=algorithm.whiten,
        )
    )
    if not isinstance(estimated, AdvantageResult):
        return f"gave {_shown(estimated)}"
    if traits.critic and estimated.returns_N is None:
        return "gave no returns_N, which the critic learns from"
    for name, tensor in (("advantages_N", estimated.advantages_N), ("returns_N", estimated.returns_N)):
        if tensor is not None and (wrong := _tokens(name, tensor)):
            return wrong
        if isinstance(tensor, Tensor) and not tensor.is_floating_point():
            return f"gave {name} of type {tensor.dtype}, not of a floating-point type"
    return None


def _policy_loss(loss: Callable[..., Any], recipe: Recipe) -> str | None:
    algorithm = recipe.algorithm
    logprobs_N = (-_made_up(1).abs()).requires_grad_()
    losses = loss(
        PolicyInputs(
            logprobs_N=logprobs_N,
            old_logprobs_N=logprobs_N.detach() - 0.1,
            advantages_N=_made_up(),
            mask_N=torch.ones(_TOKENS, dtype=torch.bool),
            session_N=_SESSION_N,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            log_ratio_clamp=algorithm.log_ratio_clamp,
        )
    )
    if not isinstance(losses, PolicyTerms):
        return f"gave {_shown(losses)}"
    if wrong := _tokens("loss_N", losses.loss_N, gradient_to="logprobs_N"):
        return wrong
    if not isinstance(losses.stats_N, Mapping):
        return f"gave {_shown(losses.stats_N)} as stats_N, not a mapping"
    return next(
        (w for name, x_N in losses.stats_N.items() if (w := _tokens(f"stats_N[{name!r}]", x_N))), None
    )


def _aggregation(divisor: Callable[..., Any], recipe: Recipe) -> str | None:
    tokens_S = torch.tensor([2, 3, 4])
    divisors = divisor(tokens_S, tokens_S)
    if not isinstance(divisors, Tensor) or divisors.shape != tokens_S.shape:
        return f"gave {_shown(divisors)} for 3 sessions"
    return (
        None if (divisors > 0).all() and divisors.isfinite().all() else "gave a divisor that is not above 0"
    )


def _estimator(estimate: Callable[..., Any], recipe: Recipe) -> str | None:
    in_loss = recipe.algorithm.kl.place == "loss"
    return _of_log_ratios(estimate, in_loss)


def _sampled_divergence(estimate: Callable[..., Any], recipe: Recipe) -> str | None:
    assert recipe.distill is not None
    return _of_log_ratios(estimate, recipe.distill.through == "loss")


def _of_log_ratios(estimate: Callable[..., Any], in_loss: bool) -> str | None:
    log_ratio_N = _made_up().requires_grad_(in_loss)
    return _tokens("its result", estimate(log_ratio_N), gradient_to="log_ratio_N" if in_loss else "")


def _divergence(compare: Callable[..., Any], recipe: Recipe) -> str | None:
    """Also whether `pull` is the derivative that the gradient is made from."""
    assert recipe.distill is not None
    p, q = (torch.softmax(_made_up(seed).double().view(2, -1), dim=-1) for seed in (0, 1))
    p.requires_grad_()
    divergences = compare(Buckets(p.log() - q.log(), p, q, recipe.distill.beta))
    if not isinstance(divergences, BucketTerms):
        return f"gave {_shown(divergences)}"
    for name in ("value", "pull"):
        tensor = getattr(divergences, name)
        if not isinstance(tensor, Tensor) or tensor.shape != p.shape:
            return f"gave {_shown(tensor)} as {name} for buckets of shape {list(p.shape)}"
    if not divergences.value.requires_grad:
        return "gave a value that does not depend on p"
    (slope,) = torch.autograd.grad(divergences.value.sum(), p)
    # A term that is the same for all buckets falls out of the student's gradient.
    gap = divergences.pull - p * slope
    off = (gap - p * (gap.sum(-1, keepdim=True))).detach().abs().max()
    return None if off < 1e-6 else f"gave a pull that differs from p d(value)/dp by {float(off):.2g}"


def _schedule(schedule: Callable[..., Any], recipe: Recipe) -> str | None:
    train = recipe.train
    steps = range(train.warmup_steps, train.steps)
    for step in steps[:: max(1, len(steps) // _TRIED_STEPS)]:
        rate = schedule(step, train)
        if not isinstance(rate, int | float) or not math.isfinite(rate) or rate < 0:
            return f"gave {repr_of(rate)} at step {step}"
    return None


def _optimizer(make: Callable[..., Any], recipe: Recipe) -> str | None:
    plain = getattr(make, "__wrapped__", make)
    if isinstance(plain, type) and issubclass(plain, torch.optim.Optimizer):
        return "is the optimizer's class"
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))]
    optimizer = make(parameters, recipe.train)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"gave {_shown(optimizer)}"
    if sum(len(group["params"]) for group in optimizer.param_groups) != len(parameters):
        return "left out parameters"
    before = [_options(group) for group in optimizer.param_groups]
    for p in parameters:
        p.grad = torch.ones_like(p)
    guarded(optimizer.step, f"train.optimizer: {recipe.train.optimizer}")()
    if before != [_options(group) for group in optimizer.param_groups]:
        return "keeps state in its groups, which a checkpoint does not hold; it must be in state[p]"
    kept = [value for p in parameters for value in optimizer.state[p].values()]
    if wrong := [x for x in kept if x is not None and not isinstance(x, Tensor | int | float)]:
        return f"keeps {_shown(wrong[0])} in its state, where a checkpoint takes tensors and numbers"
    return None


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "lr")}


def _tracker(make: Any, recipe: Recipe) -> str | None:
    made = getattr(make, "__wrapped__", make)
    missing = [name for name in ("log", "close") if isinstance(made, type) and not hasattr(made, name)]
    if missing or not isinstance(made, type):
        return f"has no {missing[0]}" if missing else None
    signature = inspect.signature(made.log)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        signature.bind(None, 1, {})
    except TypeError as error:
        return f"has log{signature}: {error}"
    return None


def _tokens(name: str, values: Any, gradient_to: str = "") -> str | None:
    """What is wrong with a value for each token; it must depend on `gradient_to`, if that is given."""
    if not isinstance(values, Tensor) or values.shape != (_TOKENS,):
        return f"gave {_shown(values)} as {name} for {_TOKENS} tokens"
    if not values.isfinite().all():
        return f"gave {name} that is not finite"
    return (
        f"gave {name} without a gradient to {gradient_to}"
        if gradient_to and not values.requires_grad
        else None
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "nothing" if value is None else f"an object of type {type_name(value)}"


_TRIES: dict[str, Try] = {
    "advantage": _advantage,
    "policy_loss": _policy_loss,
    "aggregation": _aggregation,
    "kl_estimator": _estimator,
    "sampled_divergence": _sampled_divergence,
    "divergence": _divergence,
    "schedule": _schedule,
    "optimizer": _optimizer,
    "tracker": _tracker,
}
