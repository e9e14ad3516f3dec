"""Check reward functions and reward models."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.checks.value_forms import check_device, check_names, check_url, fields_of
from practicum.recipe.schema.recipe import Recipe, RewardFunction


def check_reward(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield all problems of reward functions and reward models."""
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
