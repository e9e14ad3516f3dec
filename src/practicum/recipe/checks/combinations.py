"""Combinations of options that can't work together, or that would be ignored in silence."""

from __future__ import annotations

import re
from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.algorithm_traits import ESTIMATORS, readers
from practicum.recipe.checks.check_agent import check_agent, check_minibatches
from practicum.recipe.checks.check_distill import check_distill
from practicum.recipe.checks.check_engines import check_engines
from practicum.recipe.checks.check_mismatch import check_mismatch
from practicum.recipe.checks.check_reward import check_reward, unread_algorithm
from practicum.recipe.checks.check_route import check_route
from practicum.recipe.checks.check_runtime import check_runtime
from practicum.recipe.checks.check_teachers import check_teachers
from practicum.recipe.checks.divergences import why_k1_is_dead
from practicum.recipe.checks.rules import check_device, check_names, default_of
from practicum.recipe.counts import count
from practicum.recipe.derived import cuts_sampling, has_advantage_estimator, is_supervised
from practicum.recipe.schema.recipe import Algorithm, Buffer, Eval, Kl, MakeModel, Recipe, Task

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")

_CHOSEN_BY = {
    "advantage": ("gamma", "lam", "whiten"),
    "loss": ("dual_clip", "log_ratio_clamp", "clip_low", "clip_high", "entropy"),
}
"""Options of `algorithm` that only some estimators, or only some losses, read."""


def combinations(recipe: Recipe) -> list[RecipeError]:
    """Every impossible combination of a recipe whose types are right."""
    checks = (
        *(_names, _model, _tasks, check_reward, _algorithm, _kl, _critic, _groups, _train, _eval),
        *(check_teachers, check_route, check_distill, check_agent, check_minibatches, check_runtime),
        *(check_mismatch, check_engines),
    )
    return [problem for check in checks for problem in check(recipe)]


def _names(recipe: Recipe) -> Iterator[RecipeError]:
    if not _NAME.fullmatch(recipe.name):
        yield RecipeError("name", repr(recipe.name), "letters, digits, '_', '-' and '.'", "it names a folder")
    yield from check_names("tasks", "task", recipe.tasks)


def _model(recipe: Recipe) -> Iterator[RecipeError]:
    model, make = recipe.model, recipe.model.make
    if (model.path is None) == (make is None):
        found = "neither path nor make" if make is None else "both path and make"
        advice = "set model.path to a folder or hub name, or model.make to {} for a tiny model"
        yield RecipeError("model", found, "exactly one of path and make", advice)
    yield from check_device("model", model.device)
    if recipe.train.autocast != "off" and model.dtype == "float64":
        found = f"{recipe.train.autocast} with model.dtype float64"
        yield RecipeError("train.autocast", found, "off, or float32 weights")
    if make is None:
        return
    yield from _heads(make)
    if recipe.rollout.max_new_tokens >= make.context:
        found = f"{recipe.rollout.max_new_tokens} in a context of {make.context} tokens"
        advice = "lower it, or raise model.make.context: the prompt needs room too"
        expected = "less than model.make.context"
        yield RecipeError("rollout.max_new_tokens", found, expected, advice)


def _heads(make: MakeModel) -> Iterator[RecipeError]:
    """Attention heads that the family can have."""
    if make.family in ("gpt2", "qwen2_5_vl") and make.hidden % make.heads:
        found = f"{make.hidden} with {make.heads} heads"
        yield RecipeError("model.make.hidden", found, "a multiple of model.make.heads")
    if make.family != "gpt2" and make.heads % make.kv_heads:
        found = f"{make.kv_heads} with {make.heads} heads"
        yield RecipeError("model.make.kv_heads", found, "a divisor of model.make.heads")
    width = make.hidden // make.heads
    if make.family == "qwen2_5_vl" and (width % 2 or width < 6):
        found = f"{make.hidden} with {make.heads} heads, of {width} each"
        expected = "heads of an even width of 6 or more (positions have three axes)"
        yield RecipeError("model.make.hidden", found, expected)
    if make.family not in ("gpt2", "qwen2_5_vl") and make.head_dim % 2:
        expected = "an even number (rotary positions turn pairs)"
        yield RecipeError("model.make.head_dim", str(make.head_dim), expected)


def _tasks(recipe: Recipe) -> Iterator[RecipeError]:
    for name, task in recipe.tasks.items():
        path = f"tasks.{name}"
        if (task.kind is None) == (task.file is None):
            found = "neither kind nor file" if task.kind is None else "both kind and file"
            advice = "`practicum tasks` lists the kinds; file is a JSONL or Parquet file"
            yield RecipeError(path, found, "exactly one of kind and file", advice)
            continue
        for key in ("eval_file", "prompt", "answer", "too_long") if task.kind else ("options",):
            if (value := getattr(task, key)) != default_of(Task, key):
                other = "file" if task.kind else "kind"
                found = f"{value!r} in a task without {other}"
                yield RecipeError(f"{path}.{key}", found, f"a task with {other}", f"remove {key}")
        if task.kind and task.system is not None and not task.chat:
            found = f"{task.system[:40]!r} without chat: true"
            yield RecipeError(f"{path}.system", found, "chat: true, or no system message")


def _algorithm(recipe: Recipe) -> Iterator[RecipeError]:
    algorithm = recipe.algorithm
    advantage, loss = algorithm.advantage, algorithm.loss
    if loss == "supervised" and advantage != "none":
        yield RecipeError(
            "algorithm.advantage",
            f"{advantage} with algorithm.loss supervised",
            "none",
            "demonstrations have no advantage: set algorithm.advantage to none, or another loss",
        )
    elif advantage == "none" and has_advantage_estimator(recipe):
        yield RecipeError(
            "algorithm.advantage",
            f"none with algorithm.loss {loss}",
            "an estimator such as grpo",
            "a policy loss needs an advantage; only algorithm.loss supervised goes without",
        )
    elsewhere = set(unread_algorithm(recipe))
    for option, chooser in ((option, key) for key, options in _CHOSEN_BY.items() for option in options):
        value, choice, by = getattr(algorithm, option), getattr(algorithm, chooser), readers(option)
        default = default_of(Algorithm, option)
        if value != default and choice not in by and not {option, chooser} & elsewhere:
            yield RecipeError(
                f"algorithm.{option}",
                f"{value} with algorithm.{chooser} {choice}, which does not use it",
                f"{'null' if default is None else default}, or algorithm.{chooser} {' or '.join(by)}",
            )


def _kl(recipe: Recipe) -> Iterator[RecipeError]:
    kl = recipe.algorithm.kl
    if recipe.algorithm.loss == "supervised" and kl.place != "off":
        found = f"{kl.place} with algorithm.loss supervised"
        yield RecipeError("algorithm.kl.place", found, "off", "supervised training has no KL term")
    if kl.target is not None and kl.place != "reward":
        found = f"{kl.target} with algorithm.kl.place {kl.place}"
        advice = "set algorithm.kl.place to reward, or remove the target"
        yield RecipeError("algorithm.kl.target", found, "no target, or place: reward", advice)
    elif kl.target is not None and kl.coefficient == 0:
        found = "0 with a target"
        expected = "a start greater than 0 (adaptation multiplies it)"
        yield RecipeError("algorithm.kl.coefficient", found, expected)
    if kl.target is not None and 0.2 * count(recipe).sessions >= kl.horizon:
        found = f"{kl.horizon} with {count(recipe).sessions} sessions per step"
        advice = "one step could take the weight to zero or below"
        expected = f"more than {0.2 * count(recipe).sessions:g}, a fifth of a step's sessions"
        yield RecipeError("algorithm.kl.horizon", found, expected, advice)
    if recipe.algorithm.old_logprobs == "rollout" and cuts_sampling(recipe):
        found = "rollout with top_p, top_k or min_p"
        advice = "the engine's logprobs are those of the cut distribution, the learner's are not"
        yield RecipeError("algorithm.old_logprobs", found, "auto or recompute", advice)
    if kl.place == "loss" and kl.estimator == "k1":
        expected = "an estimator whose gradient depends on the reference"
        advice = f"{why_k1_is_dead('reference')}; use k2 or k3, or k1 with algorithm.kl.place reward"
        yield RecipeError("algorithm.kl.estimator", "k1 with algorithm.kl.place loss", expected, advice)
    for option in ("reference", "coefficient", "estimator", "clamp", "horizon"):
        value = getattr(kl, option)
        if kl.place == "off" and value != default_of(Kl, option):
            found = f"{value!r} with algorithm.kl.place off"
            advice = "nothing would read it: set algorithm.kl.place to reward or loss"
            yield RecipeError(f"algorithm.kl.{option}", found, "a place for the penalty", advice)


def _critic(recipe: Recipe) -> Iterator[RecipeError]:
    advantage = recipe.algorithm.advantage
    needed = ESTIMATORS[advantage].critic
    if not is_supervised(recipe) and not has_advantage_estimator(recipe):
        return
    if needed and recipe.critic is None:
        found = f"no critic with algorithm.advantage {advantage}"
        yield RecipeError("critic", found, "a critic", "add critic: {} for one with the defaults")
    if recipe.critic is None:
        return
    if not needed:
        found = f"a critic with algorithm.advantage {advantage}"
        names = " and ".join(name for name, traits in ESTIMATORS.items() if traits.critic)
        advice = f"only {names} has a critic: set critic to null, or algorithm.advantage to {names}"
        yield RecipeError("critic", found, "null", advice)
    elif 0 < recipe.train.steps <= recipe.critic.warmup_steps:
        found = f"{recipe.critic.warmup_steps} of {recipe.train.steps} steps"
        advice = "the student would never learn"
        yield RecipeError("critic.warmup_steps", found, "less than train.steps", advice)


def _groups(recipe: Recipe) -> Iterator[RecipeError]:
    advantage, samples = recipe.algorithm.advantage, recipe.rollout.samples
    compares = ESTIMATORS[advantage].compares_groups
    if compares and samples < 2 and has_advantage_estimator(recipe):
        yield RecipeError(
            "rollout.samples",
            f"{samples} with algorithm.advantage {advantage}",
            "at least 2",
            "it compares the sessions of a prompt: a group of one has no relative signal",
        )
    refills = recipe.buffer.max_refills
    if not recipe.buffer.filter_flat_groups and refills != default_of(Buffer, "max_refills"):
        found = f"{refills} with buffer.filter_flat_groups false"
        yield RecipeError("buffer.max_refills", found, "filter_flat_groups: true", "nothing else refills")
    if recipe.buffer.filter_flat_groups and recipe.reward.weight and not compares:
        names = sorted(name for name, traits in ESTIMATORS.items() if traits.compares_groups)
        yield RecipeError(
            "buffer.filter_flat_groups",
            f"true with algorithm.advantage {advantage}",
            "false, or a group estimator",
            f"only {', '.join(names)} learn nothing from equal rewards",
        )


def _train(recipe: Recipe) -> Iterator[RecipeError]:
    train = recipe.train
    if 0 < train.steps < train.warmup_steps:
        found = f"{train.warmup_steps} of {train.steps} steps"
        yield RecipeError("train.warmup_steps", found, "at most train.steps")
    if train.final_lr > train.lr:
        found = f"{train.final_lr} with train.lr {train.lr}"
        yield RecipeError("train.final_lr", found, "at most train.lr")
    if train.final_lr and train.schedule == "constant":
        found = f"{train.final_lr} with train.schedule constant"
        yield RecipeError("train.final_lr", found, "0, or train.schedule linear or cosine")


def _eval(recipe: Recipe) -> Iterator[RecipeError]:
    measured, best = recipe.eval.greedy or recipe.eval.samples, recipe.checkpoint.keep_best
    if recipe.eval.every and not measured:
        found = f"{recipe.eval.every} with eval.greedy false and eval.samples 0"
        advice = "set eval.greedy to true or eval.samples to at least 1"
        yield RecipeError("eval.every", found, "an evaluation that measures something", advice)
    for option in ("temperature", "pass_threshold"):
        value = getattr(recipe.eval, option)
        if not recipe.eval.samples and value != default_of(Eval, option):
            found = f"{value} with eval.samples 0"
            yield RecipeError(f"eval.{option}", found, "eval.samples of at least 1", "only samples use it")
    if recipe.eval.stop_at is not None and not (recipe.eval.greedy and recipe.eval.every):
        found = f"{recipe.eval.stop_at} without greedy evaluations during training"
        advice = "set eval.every to the steps between them, and eval.greedy to true"
        yield RecipeError("eval.stop_at", found, "evaluations to stop by", advice)
    if best is None:
        return
    if not best.startswith("eval/"):
        expected = "a metric of an evaluation, such as eval/greedy"
        yield RecipeError("checkpoint.keep_best", repr(best), expected)
    if not measured or not recipe.eval.every:
        found = f"{best!r} without evaluations during training"
        advice = "set eval.every to the steps between them, and eval.greedy or eval.samples"
        yield RecipeError("checkpoint.keep_best", found, "evaluations to choose by", advice)
    elif best.endswith("/greedy") and not recipe.eval.greedy:
        found = f"{best!r} with eval.greedy false"
        yield RecipeError("checkpoint.keep_best", found, "a metric that is measured")
