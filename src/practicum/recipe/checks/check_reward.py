"""Rewards that nothing learns from, options that nothing reads then, and reward models that can't judge."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.checks.rules import check_device, check_names, check_url, unread
from practicum.recipe.derived import (
    computes_reward,
    evaluates,
    has_advantage_estimator,
    has_policy_loss,
    is_supervised,
    uses_reward,
)
from practicum.recipe.schema.recipe import Recipe, RewardFunction
from practicum.recipe.schema.teacher_sections import RewardModel
from practicum.recipe.text.templates import fields_of

_ESTIMATOR = ("advantage", "gamma", "lam", "whiten")
_POLICY = ("loss", "clip_low", "clip_high", "dual_clip", "log_ratio_clamp", "old_logprobs")
_HERE = ("placement", "dtype", "device", "batch_tokens")
_SERVER = ("concurrency", "retries", "api_key_env")
_JUDGE = ("prompt", "scale", "max_new_tokens")
_FIELDS = ("prompt", "response", "answer")


def check_reward(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of rewards: their weight, what it leaves unread, functions and models."""
    yield from _weight(recipe)
    yield from _without_reward(recipe)
    yield from _functions(recipe)
    yield from check_names("reward.models", "reward model", recipe.reward.models)
    yield from _of_use(recipe)
    for name, model in recipe.reward.models.items():
        yield from _model(f"reward.models.{name}", model)


def unread_algorithm(recipe: Recipe) -> tuple[str, ...]:
    """Options of the algorithm that nothing reads because nothing is learnt from rewards."""
    if is_supervised(recipe) or recipe.distill is None or uses_reward(recipe):
        return ()
    estimator = () if has_advantage_estimator(recipe) else _ESTIMATOR
    return estimator if has_policy_loss(recipe) else (*estimator, *_POLICY)


def _weight(recipe: Recipe) -> Iterator[RecipeError]:
    reward = recipe.reward
    if is_supervised(recipe):
        advice = "demonstrations are not judged: remove it"
        why = "with algorithm.loss supervised"
        yield from unread(reward, "reward", ("weight", "watch"), why, advice)
    elif reward.weight == 0 and recipe.distill is None:
        advice = "nothing is left to learn from: raise it, or add teachers and distill"
        yield RecipeError("reward.weight", "0 without distill", "greater than 0", advice)
    elif reward.weight and reward.watch:
        found = f"true with reward.weight {reward.weight:g}"
        advice = "rewards that are learnt from are in the metrics anyway: remove it"
        yield RecipeError("reward.watch", found, "false, or reward.weight 0", advice)


def _without_reward(recipe: Recipe) -> Iterator[RecipeError]:
    distill = recipe.distill
    if is_supervised(recipe) or distill is None or uses_reward(recipe):
        return
    why = f"with reward.weight 0 and distill.through {distill.through}"
    learnt = "no policy loss is" if not has_policy_loss(recipe) else "the teachers' advantage alone is"
    advice = f"{learnt} learnt from then: remove it, or set reward.weight"
    yield from unread(recipe.algorithm, "algorithm", unread_algorithm(recipe), why, advice)
    if not has_advantage_estimator(recipe):
        if recipe.critic is not None:
            yield RecipeError(
                "critic", f"a critic {why}", "null", "no advantage is estimated from values then"
            )
        if recipe.algorithm.kl.place == "reward":
            expected = "loss or off"
            yield RecipeError(
                "algorithm.kl.place", f"reward {why}", expected, "no reward is learnt from then"
            )
    if recipe.buffer.filter_flat_groups:
        found = "true with reward.weight 0"
        advice = "groups are flat in rewards, and none is learnt from"
        yield RecipeError("buffer.filter_flat_groups", found, "false", advice)


def _functions(recipe: Recipe) -> Iterator[RecipeError]:
    if any(model.weight for model in recipe.reward.models.values()):
        return
    if not computes_reward(recipe) and not evaluates(recipe):
        return
    lists: dict[str, list[RewardFunction] | None] = {"reward.functions": recipe.reward.functions}
    lists |= {f"tasks.{name}.rewards": task.rewards for name, task in recipe.tasks.items()}
    for path, functions in lists.items():
        if functions is not None and not any(function.weight for function in functions):
            found = "no reward" if not functions else "weights that are all 0"
            yield RecipeError(path, found, "at least one reward with a weight that is not 0")


def _of_use(recipe: Recipe) -> Iterator[RecipeError]:
    """Models that nobody asks, or that share the metric reward/part/<name> with a function."""
    if recipe.reward.models and not computes_reward(recipe) and not evaluates(recipe):
        found, advice = "reward models, and no answer is judged", "remove them, or set reward.watch: true"
        yield RecipeError("reward.models", found, "none", advice)
    lists = [recipe.reward.functions, *(task.rewards or [] for task in recipe.tasks.values())]
    functions = {function.use.rpartition(":")[2] for some in lists for function in some}
    for name in recipe.reward.models:
        if name in functions:
            expected = "a name that no reward function has"
            advice = f"both would be the metric reward/part/{name}: call the model something else"
            yield RecipeError(
                f"reward.models.{name}", f"a model named like the reward {name}", expected, advice
            )


def _model(path: str, model: RewardModel) -> Iterator[RecipeError]:
    yield from check_url(path, model.url)
    yield from check_device(path, model.device)
    if model.weight == 0:
        yield RecipeError(
            f"{path}.weight", "0", "a weight that is not 0", "remove a model that counts nothing"
        )
    if model.url is not None:
        yield from unread(model, path, _HERE, "with url", "the server decides that")
    else:
        yield from unread(model, path, _SERVER, "without url", "only requests to a server use it")
    if model.kind == "judge":
        yield from unread(model, path, ("label",), "with kind judge", "only a classifier has labels")
        yield from _question(f"{path}.prompt", model.prompt)
    else:
        yield from unread(
            model, path, _JUDGE, "with kind classifier", "only a judge is asked: set kind: judge"
        )


def _question(path: str, text: str) -> Iterator[RecipeError]:
    expected = "text with {response}, and {prompt} and {answer} if it needs them; {{ }} for braces"
    try:
        fields = fields_of(text)
    except ValueError as error:
        yield RecipeError(path, str(error), expected)
        return
    if unknown := [field for field in fields if field not in _FIELDS]:
        yield RecipeError(path, f"the field {{{unknown[0]}}}", expected, "nothing else is known of an answer")
    elif "response" not in fields:
        yield RecipeError(path, "no {response}", expected, "the judge would not see the answer")
