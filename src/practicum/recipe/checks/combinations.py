"""Every check of a recipe whose types are right, and those of its model, tasks, steps and evaluations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.checks.check_algorithm import check_algorithm
from practicum.recipe.checks.check_async import check_async
from practicum.recipe.checks.check_reward import check_reward
from practicum.recipe.checks.check_runtime import check_runtime
from practicum.recipe.checks.check_teachers import check_teachers
from practicum.recipe.checks.check_vllm import check_vllm
from practicum.recipe.checks.divergences import check_distill
from practicum.recipe.checks.routing import check_route
from practicum.recipe.checks.unread_keys import check_unread
from practicum.recipe.checks.value_forms import check_device, check_names
from practicum.recipe.counts import count
from practicum.recipe.derived import model_traits
from practicum.recipe.schema.recipe import MakeModel, Recipe, Task

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def combinations(recipe: Recipe) -> list[RecipeError]:
    """Every key that nothing reads and every impossible combination of a recipe."""
    checks = (
        *(check_unread, _names, _model, _engine, _tasks, _agent, _minibatches, _train, _eval),
        *(check_algorithm, check_async, check_reward, check_teachers, check_route, check_distill),
        *(check_runtime, check_vllm),
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
    """Attention heads and experts that the family can have."""
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
    if make.family == "qwen3_moe" and make.experts_per_token > make.experts:
        found = f"{make.experts_per_token} of {make.experts} experts"
        yield RecipeError("model.make.experts_per_token", found, "at most model.make.experts")


def _engine(recipe: Recipe) -> Iterator[RecipeError]:
    if recipe.rollout.engine != "vllm":
        return
    traits = model_traits(recipe.model)
    if recipe.model.dtype == "float64":
        found = "float64 with rollout.engine vllm"
        yield RecipeError("model.dtype", found, "float32 or bfloat16, or rollout.engine: torch")
    if traits.vision:
        found, advice = "vllm with a model that sees pictures", "pictures are seen by the torch engine only"
        yield RecipeError("rollout.engine", found, "torch", advice)
    if traits.moe and recipe.train.replay_experts:
        advice = "vLLM does not tell which experts a token took: set it to false, or rollout.engine: torch"
        yield RecipeError("train.replay_experts", "true with rollout.engine vllm", "false", advice)


def _tasks(recipe: Recipe) -> Iterator[RecipeError]:
    for name, task in recipe.tasks.items():
        yield from check_source(name, task)
        if task.streaming and task.too_long == "skip":
            advice = "rows of a stream are not measured before: set it to cut, or streaming to false"
            yield RecipeError(f"tasks.{name}.too_long", "skip with streaming", "error or cut", advice)


def check_source(name: str, task: Task) -> Iterator[RecipeError]:
    """A task takes its prompts from one place."""
    named = [key for key in ("kind", "file", "dataset") if getattr(task, key) is not None]
    if len(named) != 1:
        found = " and ".join(named) if named else "none of kind, file and dataset"
        advice = "`practicum tasks` lists the kinds; a file is JSONL, JSON, CSV or Parquet"
        yield RecipeError(f"tasks.{name}", found, "exactly one of kind, file and dataset", advice)
    elif task.file == [] or task.eval_file == []:
        key = "file" if task.file == [] else "eval_file"
        yield RecipeError(f"tasks.{name}.{key}", "an empty list", "at least one file")


def _agent(recipe: Recipe) -> Iterator[RecipeError]:
    agent = recipe.agent
    if agent.loop == "tool_use" and not agent.tools:
        expected = "at least one tool, such as [calculator]"
        yield RecipeError("agent.tools", "none with agent.loop tool_use", expected)
    if agent.deadline_s is not None and agent.deadline_s > recipe.rollout.deadline_s:
        found = f"{agent.deadline_s:g} with rollout.deadline_s {recipe.rollout.deadline_s:g}"
        advice = "all sessions of a step must be done in rollout.deadline_s: lower one, or raise the other"
        yield RecipeError("agent.deadline_s", found, "at most rollout.deadline_s", advice)


def _minibatches(recipe: Recipe) -> Iterator[RecipeError]:
    """Mini-batches are asked for in one way, and each has something to learn from."""
    train, sessions = recipe.train, count(recipe).sessions
    if train.minibatch_rows is not None and train.minibatches != 1:
        found = f"{train.minibatch_rows} with train.minibatches {train.minibatches}"
        advice = "say how many optimizer steps there are, or how many rows each takes"
        yield RecipeError("train.minibatch_rows", found, "one of the two", advice)
    elif train.minibatches > sessions:
        found = f"{train.minibatches} with {sessions} sessions per step"
        advice = "raise train.prompts or rollout.samples, or lower it"
        yield RecipeError("train.minibatches", found, f"at most {sessions}", advice)
    if recipe.agent.loop != "single_turn":  # a session of other loops may leave several rows
        return
    rows_of = {"train": train.minibatch_rows, "critic": recipe.critic and recipe.critic.minibatch_rows}
    for section, rows in rows_of.items():
        if rows is not None and rows > sessions:
            found = f"{rows} with {sessions} rows per step"
            advice = "lower it, leave it out for one optimizer step, or raise train.prompts"
            yield RecipeError(f"{section}.minibatch_rows", found, f"at most {sessions}", advice)


def _train(recipe: Recipe) -> Iterator[RecipeError]:
    train = recipe.train
    if 0 < train.steps < train.warmup_steps:
        found = f"{train.warmup_steps} of {train.steps} steps"
        yield RecipeError("train.warmup_steps", found, "at most train.steps")
    if train.final_lr > train.lr:
        found = f"{train.final_lr} with train.lr {train.lr}"
        yield RecipeError("train.final_lr", found, "at most train.lr")


def _eval(recipe: Recipe) -> Iterator[RecipeError]:
    rules = recipe.eval
    if rules.every and not rules.rows:
        yield RecipeError("eval.every", f"{rules.every} with eval.rows 0", "0", "set eval.rows")
    if rules.stop_at is not None and not (rules.rows and rules.every):
        found = f"{rules.stop_at} without evaluations during training"
        yield RecipeError("eval.stop_at", found, "evaluations to stop by", "set eval.every")
