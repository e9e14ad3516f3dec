"""Run every check of a recipe with valid types. Check models, tasks, rewards, steps and evaluations."""

from __future__ import annotations

import re
from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.checks.check_algorithm import check_algorithm
from practicum.recipe.checks.check_engines import check_engines, check_runtime
from practicum.recipe.checks.check_teachers import check_teachers
from practicum.recipe.checks.divergences import check_distill
from practicum.recipe.checks.routing import check_route
from practicum.recipe.checks.unread_keys import check_unread
from practicum.recipe.checks.value_forms import check_device, check_names, check_url, fields_of
from practicum.recipe.schema.recipe import Model, Recipe, RewardFunction, Task, Train

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def combinations(recipe: Recipe) -> list[RecipeError]:
    """Return a problem for every key that nothing reads and every impossible combination."""
    checks = (
        *(check_unread, _sections, check_algorithm, _reward, check_teachers, check_route),
        *(check_distill, check_runtime, check_engines),
    )
    return [problem for check in checks for problem in check(recipe)]


def _sections(recipe: Recipe) -> Iterator[RecipeError]:
    if not _NAME.fullmatch(recipe.name):
        yield RecipeError("name", repr(recipe.name), "letters, digits, '_', '-' and '.'", "it names a folder")
    yield from check_names("tasks", "task", recipe.tasks)
    yield from _model(recipe.model, recipe.rollout.max_new_tokens)
    for name, task in recipe.tasks.items():
        yield from _task(f"tasks.{name}", task)
    agent, rollout = recipe.agent, recipe.rollout
    if agent.loop == "tool_use" and not agent.tools:
        yield RecipeError("agent.tools", "none with agent.loop tool_use", "a tool, such as [calculator]")
    if agent.deadline_s is not None and agent.deadline_s > rollout.deadline_s:
        found = f"{agent.deadline_s:g} with rollout.deadline_s {rollout.deadline_s:g}"
        advice = "rollout.deadline_s limits all sessions of a step: lower agent.deadline_s, or raise it"
        yield RecipeError("agent.deadline_s", found, "at most rollout.deadline_s", advice)
    # A session of other loops may leave several rows.
    rows = recipe.counts.sessions if agent.loop == "single_turn" else None
    yield from _train(recipe.train, recipe.model.dtype, recipe.counts.sessions, rows)
    evaluation = recipe.eval
    if evaluation.every and not evaluation.rows:
        yield RecipeError("eval.every", f"{evaluation.every} with eval.rows 0", "0", "set eval.rows")
    if evaluation.stop_at is not None and not (evaluation.rows and evaluation.every):
        found = f"{evaluation.stop_at} with eval.every 0"
        yield RecipeError("eval.stop_at", found, "evaluations during training", "set eval.every")


def _model(model: Model, max_new_tokens: int) -> Iterator[RecipeError]:
    make = model.random_init
    if (model.path is None) == (make is None):
        found = "neither path nor random_init" if make is None else "both path and random_init"
        advice = "set model.path to a folder or hub name, or model.random_init to {} for a tiny model"
        yield RecipeError("model", found, "exactly one of path and random_init", advice)
    yield from check_device("model", model.device)
    if make is None:
        return
    if max_new_tokens >= make.context:
        found = f"{max_new_tokens} in a context of {make.context} tokens"
        advice = "the prompt must fit too: lower it, or raise model.random_init.context"
        yield RecipeError("rollout.max_new_tokens", found, "less than model.random_init.context", advice)
    # Rotary embeddings rotate pairs: all of them, on three axes (qwen2_5_vl), or a quarter (qwen3_5).
    multiple = {"gpt2": 1, "qwen3_5": 8}.get(make.family, 2)
    if make.hidden % (make.heads * multiple) or (make.family == "qwen2_5_vl" and make.head_dim < 6):
        found = f"{make.hidden} with {make.heads} heads"
        expected = f"{make.heads} × a multiple of {multiple}" + ", at least 6" * (make.family == "qwen2_5_vl")
        yield RecipeError("model.random_init.hidden", found, expected)


def _task(path: str, task: Task) -> Iterator[RecipeError]:
    named = [key for key in ("kind", "file", "dataset") if getattr(task, key) is not None]
    if len(named) != 1:
        found = " and ".join(named) if named else "none of kind, file and dataset"
        advice = "`practicum tasks` lists the kinds; a file is JSONL, JSON, CSV or Parquet"
        yield RecipeError(path, found, "exactly one of kind, file and dataset", advice)
    for key in ("file", "eval_file"):
        if getattr(task, key) == []:
            yield RecipeError(f"{path}.{key}", "an empty list", "at least one file")


def _train(train: Train, dtype: str, sessions: int, rows: int | None) -> Iterator[RecipeError]:
    """Yield problems of the section train. `rows` is the number of rows per step, if it is known."""
    if train.autocast != "off" and dtype == "float64":
        found = f"{train.autocast} with model.dtype float64"
        yield RecipeError("train.autocast", found, "off, or float32 weights")
    size = train.minibatch_size
    if size is not None and train.minibatches != 1:
        found = f"{size} with train.minibatches {train.minibatches}"
        advice = "set the number of optimizer steps or the rows of each, not both"
        yield RecipeError("train.minibatch_size", found, "one of the two", advice)
    elif train.minibatches > sessions:
        found = f"{train.minibatches} with {sessions} sessions per step"
        advice = "lower it, or raise train.prompts or rollout.samples"
        yield RecipeError("train.minibatches", found, f"at most {sessions}", advice)
    if size is not None and rows is not None and size > rows:
        found = f"{size} with {rows} rows per step"
        advice = "lower it, remove it for one optimizer step, or raise train.prompts"
        yield RecipeError("train.minibatch_size", found, f"at most {rows}", advice)
    if 0 < train.steps < train.warmup_steps:
        found = f"{train.warmup_steps} of {train.steps} steps"
        yield RecipeError("train.warmup_steps", found, "at most train.steps")
    if train.final_lr > train.lr:
        yield RecipeError("train.final_lr", f"{train.final_lr} with train.lr {train.lr}", "at most train.lr")


def _reward(recipe: Recipe) -> Iterator[RecipeError]:
    models = recipe.reward.models
    lists: dict[str, list[RewardFunction] | None] = {"reward.functions": recipe.reward.functions}
    lists |= {f"tasks.{name}.rewards": task.rewards for name, task in recipe.tasks.items()}
    if (recipe.computes_reward or recipe.evaluates) and not any(m.weight for m in models.values()):
        for path, functions in lists.items():
            if functions is not None and not any(function.weight for function in functions):
                found = "no reward" if not functions else "weights that are all 0"
                yield RecipeError(path, found, "at least one reward with a weight that is not 0")
    yield from check_names("reward.models", "reward model", models)
    functions = {function.use.rpartition(":")[2] for some in lists.values() for function in some or ()}
    for name, model in models.items():
        path = f"reward.models.{name}"
        if name in functions:
            found, expected = f"a model named like the reward {name}", "a name that no reward function has"
            advice = f"both would be the metric reward/part/{name}: call the model something else"
            yield RecipeError(path, found, expected, advice)
        yield from check_url(path, model.url)
        yield from check_device(path, model.device)
        if model.weight == 0:
            expected, advice = "a weight that is not 0", "remove the model if it should not count"
            yield RecipeError(f"{path}.weight", "0", expected, advice)
        if model.kind == "judge":
            yield from _question(f"{path}.prompt", model.prompt)


def _question(path: str, text: str) -> Iterator[RecipeError]:
    expected = "text with {response}, and {prompt} and {answer} if it needs them; {{ }} for braces"
    try:
        fields = fields_of(text)
    except ValueError as error:
        yield RecipeError(path, str(error), expected)
        return
    if unknown := [field for field in fields if field not in ("prompt", "response", "answer")]:
        yield RecipeError(path, f"the field {{{unknown[0]}}}", expected, "no other field is filled in")
    elif "response" not in fields:
        yield RecipeError(path, "no {response}", expected, "the judge would not see the response")
