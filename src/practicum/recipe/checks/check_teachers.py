"""Teachers that can't teach: not one way to reach them, options that nothing reads, duplicates."""

from __future__ import annotations

from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.checks.rules import check_device, check_names, check_url, unread
from practicum.recipe.derived import is_supervised
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.recipe.text.templates import fields_of

_WAYS = (["model"], ["model", "url"], ["student"])
_HERE = ("placement", "engine", "vllm", "dtype", "device", "memory_gb", "batch_tokens")
_SERVER = ("concurrency", "retries", "api_key_env")
_LOADED = ("dtype", "device", "tokenizer")
_IDENTITY = ("model", "url", "student", "before", "tokenizer", "dtype")


def check_teachers(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of the teachers themselves, and of teachers and distill without one another."""
    yield from _pairing(recipe)
    yield from check_names("teachers", "teacher", recipe.teachers)
    for name, teacher in recipe.teachers.items():
        yield from _teacher(f"teachers.{name}", teacher)
    yield from _duplicates(recipe.teachers)
    yield from _memory(recipe)


def _pairing(recipe: Recipe) -> Iterator[RecipeError]:
    if is_supervised(recipe) and (recipe.teachers or recipe.distill):
        key = "distill" if recipe.distill else "teachers"
        yield RecipeError(
            key,
            f"{key} with algorithm.loss supervised",
            "another algorithm.loss",
            "teachers correct what the student samples, not demonstrations: remove algorithm.loss and "
            f"algorithm.advantage, or {key}",
        )
    elif recipe.teachers and recipe.distill is None:
        advice = "add distill: {} to learn from them by the defaults, or remove them"
        found = f"{', '.join(recipe.teachers)} without distill"
        yield RecipeError("teachers", found, "a distill section", advice)
    elif recipe.distill is not None and not recipe.teachers:
        advice = "add one, such as teachers: {math: {model: runs/math/export}}, or remove distill"
        yield RecipeError("distill", "distill without teachers", "at least one teacher", advice)


def _teacher(path: str, teacher: Teacher) -> Iterator[RecipeError]:
    given = [key for key in ("model", "url", "student") if getattr(teacher, key) is not None]
    if given not in _WAYS:
        found = " and ".join(given) or "neither model, url nor student"
        expected = "model, or url and model, or student"
        if given == ["url"]:
            yield RecipeError(path, "url without model", expected, "set model to its name on that server")
        else:
            yield RecipeError(path, found, expected, "a teacher is reached in one way")
        return
    yield from check_url(path, teacher.url)
    yield from check_device(path, teacher.device)
    if teacher.url is not None:
        yield from unread(teacher, path, _HERE, "with url", "the server decides that")
    else:
        yield from unread(teacher, path, _SERVER, "without url", "only requests to a server use it")
    if teacher.student is not None:
        advice = "a copy of the student is held as the student is: see model"
        yield from unread(teacher, path, _LOADED, "with student", advice)
    try:
        fields_of(teacher.before or "")
    except ValueError as error:
        expected = "{answer} or columns in braces, and {{ }} for braces"
        yield RecipeError(f"{path}.before", str(error), expected)


def _duplicates(teachers: dict[str, Teacher]) -> Iterator[RecipeError]:
    seen: list[tuple[str, list[object]]] = []
    for name, teacher in teachers.items():
        identity = [_plain(getattr(teacher, key)) for key in _IDENTITY]
        twin = next((other for other, theirs in seen if theirs == identity), None)
        reached = teacher.model or teacher.url or teacher.student
        if twin is not None and reached:
            yield RecipeError(
                f"teachers.{name}",
                f"the same teacher as {twin}",
                "teachers that differ in model, url, student, before, tokenizer or dtype",
                f"remove {name}, and let route.to send its prompts to {twin}",
            )
        seen.append((name, identity))


def _plain(value: object) -> object:
    return value.rstrip("/") if isinstance(value, str) else value


def _memory(recipe: Recipe) -> Iterator[RecipeError]:
    models = [*recipe.teachers.values(), *recipe.reward.models.values()]
    runtime = recipe.runtime
    if not any(model.url is None and model.placement == "colocated" for model in models):
        why, advice = "without a colocated teacher or reward model", "only models that sleep are moved"
        yield from unread(runtime, "runtime", ("teachers_gb", "teachers_host_gb"), why, advice)
    elif runtime.teachers_gb is None:
        advice = "without a budget of the device no model leaves it: set runtime.teachers_gb too"
        yield from unread(runtime, "runtime", ("teachers_host_gb",), "without teachers_gb", advice)
