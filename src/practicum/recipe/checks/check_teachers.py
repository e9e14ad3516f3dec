"""Check teachers: each has exactly one source, no duplicates, and valid targets."""

from __future__ import annotations

import math
from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.checks.value_forms import check_device, check_names, check_url, fields_of
from practicum.recipe.derived import products
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Distill, Teacher

_REACHED_BY = (["model"], ["model", "url"], ["adapter"], ["model", "adapter"], ["student"])
_IDENTITY = ("model", "adapter", "url", "student", "prompt_prefix", "tokenizer", "dtype")


def check_teachers(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield every problem of the teachers, and teachers or distill without the other."""
    teachers, distill = recipe.teachers, recipe.distill
    if recipe.is_supervised and distill:
        found, expected = "distill with algorithm.loss supervised", "another algorithm.loss"
        advice = "teachers correct what the student samples: remove algorithm.loss, or distill"
        yield RecipeError("distill", found, expected, advice)
    elif recipe.teachers_answer:
        yield from _answering(recipe)
    elif teachers and distill is None:
        advice = "add distill: {} for the defaults, or remove the teachers"
        yield RecipeError("teachers", f"{', '.join(teachers)} without distill", "a distill section", advice)
    elif distill is not None and not teachers:
        advice = "add one, such as teachers: {math: {model: runs/math/export}}, or remove distill"
        yield RecipeError("distill", "distill without teachers", "at least one teacher", advice)
    yield from check_names("teachers", "teacher", teachers)
    for name, teacher in teachers.items():
        yield from _teacher(f"teachers.{name}", teacher)
    yield from _duplicates(teachers)
    yield from _targets(teachers, distill)
    for name in teachers:
        yield from _mixture(name, recipe)


def _answering(recipe: Recipe) -> Iterator[RecipeError]:
    """Yield teachers that can't sample responses for supervised training."""
    if recipe.on_ray:
        found, advice = "teachers that sample responses with runtime.kind ray", "set runtime.kind: local"
        yield RecipeError("teachers", found, "teachers in this process", advice)
    for name, teacher in recipe.teachers.items():
        keys = ("url", "adapter", "student", "prompt_prefix", "target")
        unfit = [key for key in keys if getattr(teacher, key) is not None]
        unfit += ["engine"] * (not teacher.engine_traits.runs_transformers)
        if unfit:
            found = f"{unfit[0]} of a teacher that samples responses (algorithm.loss supervised)"
            advice = "merge an adapter into its base first" if "adapter" in unfit else f"remove {unfit[0]}"
            yield RecipeError(
                f"teachers.{name}.{unfit[0]}", found, "a model here, on the torch engine", advice
            )


def _teacher(path: str, teacher: Teacher) -> Iterator[RecipeError]:
    keys = [key for key in ("model", "url", "adapter", "student") if getattr(teacher, key) is not None]
    if keys not in _REACHED_BY:
        found = " and ".join(keys) or "neither model, url, adapter nor student"
        expected = "model, or url and model, or adapter with or without model, or student"
        advice = "a teacher has one source"
        if keys == ["url"]:
            advice = "set model to its name on that server"
        elif "url" in keys and "adapter" in keys:
            advice = "set model to the adapter's name on the server, and remove adapter"
        yield RecipeError(path, found, expected, advice)
        return
    yield from check_url(path, teacher.url)
    yield from check_device(path, teacher.device)
    try:
        fields_of(teacher.prompt_prefix or "")
    except ValueError as error:
        expected = "{answer} or columns in braces, and {{ }} for braces"
        yield RecipeError(f"{path}.prompt_prefix", str(error), expected)


def _duplicates(teachers: dict[str, Teacher]) -> Iterator[RecipeError]:
    seen: dict[str, str] = {}
    for name, teacher in teachers.items():
        values = [getattr(teacher, key) for key in _IDENTITY]
        identity = repr([value.rstrip("/") if isinstance(value, str) else value for value in values])
        twin = seen.setdefault(identity, name)
        if twin != name and (teacher.model or teacher.adapter or teacher.url or teacher.student):
            expected = f"a different {', '.join(_IDENTITY[:-1])} or {_IDENTITY[-1]}"
            advice = f"remove {name}, and let route.map send its prompts to {twin}"
            yield RecipeError(f"teachers.{name}", f"the same teacher as {twin}", expected, advice)


def _targets(teachers: dict[str, Teacher], distill: Distill | None) -> Iterator[RecipeError]:
    for name, teacher in teachers.items():
        path, target = f"teachers.{name}.target", teacher.target
        if target is None:
            pass
        elif unknown := [other for other in target if other not in teachers]:
            expected = f"exponents of {', '.join(teachers)}"
            yield RecipeError(path, f"no teacher {unknown[0]}", expected, "add it to teachers")
        elif abs(math.fsum(target.values()) - 1) > 1e-6:
            found, advice = f"a sum of {math.fsum(target.values()):g}", "a base model has a negative exponent"
            yield RecipeError(path, found, "exponents whose sum is 1", advice)
        elif apart := [other for other in target if teachers[other].scores_during_rollout]:
            found = f"{apart[0]}, which is not colocated"
            yield RecipeError(path, found, "colocated teachers", "remove its placement or url")
    if (names := list(products(teachers))) and distill is not None and distill.signal != "full":
        advice = "a product of top-k distributions has no exact tail: set distill.signal: full"
        found = f"{distill.signal} with teachers.{names[0]}.target"
        yield RecipeError("distill.signal", found, "full", advice)


def _mixture(name: str, recipe: Recipe) -> Iterator[RecipeError]:
    teachers, distill = recipe.teachers, recipe.distill
    path, mixture = f"teachers.{name}.mixture", teachers[name].mixture
    if mixture is None:
        return
    if unknown := [other for other in mixture if other not in teachers]:
        expected = f"weights of {', '.join(teachers)}"
        yield RecipeError(path, f"no teacher {unknown[0]}", expected, "add it to teachers")
    elif abs(math.fsum(mixture.values()) - 1) > 1e-6 or min(mixture.values()) < 0:
        found = ", ".join(f"{weight:g}" for weight in mixture.values())
        yield RecipeError(path, found, "weights from 0 up whose sum is 1")
    elif teachers[name].target is not None:
        advice = "a teacher teaches a product or a mixture: remove one of them"
        yield RecipeError(path, "a mixture beside a target", "one of the two", advice)
    elif recipe.on_ray and any(teachers[other].scores_during_rollout for other in (name, *mixture)):
        found = "teachers in separate processes or on servers with runtime.kind ray"
        yield RecipeError(path, found, "colocated teachers", "remove placement and url")
    elif len({teachers[other].scores_during_rollout for other in (name, *mixture)}) > 1:
        found = "teachers that score during the rollout beside colocated ones"
        yield RecipeError(path, found, "teachers of one placement")
    if distill is not None and distill.signal not in ("student_top_k", "sampled"):
        found = f"{distill.signal} with {path}"
        advice = "teachers are mixed at tokens that all of them score: set distill.signal: student_top_k"
        yield RecipeError("distill.signal", found, "student_top_k or sampled", advice)
