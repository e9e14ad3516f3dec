"""Teachers that can't teach: not reached in one way, duplicates, and what their engines can't do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from practicum.errors import RecipeError
from practicum.recipe.checks.value_forms import check_device, check_names, check_url, fields_of
from practicum.recipe.derived import model_traits
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Teacher

_REACHED_BY = (["model"], ["model", "url"], ["adapter"], ["model", "adapter"], ["student"])
_IDENTITY = ("model", "adapter", "url", "student", "before", "tokenizer", "dtype")


def check_teachers(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of the teachers themselves, and of teachers and distill without one another."""
    yield from _pairing(recipe)
    yield from check_names("teachers", "teacher", recipe.teachers)
    for name, teacher in recipe.teachers.items():
        yield from _teacher(f"teachers.{name}", teacher)
    yield from _duplicates(recipe.teachers)
    yield from _targets(recipe)
    yield from _engines(recipe)


def _pairing(recipe: Recipe) -> Iterator[RecipeError]:
    if recipe.is_supervised and (recipe.teachers or recipe.distill):
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
    keys = [key for key in ("model", "url", "adapter", "student") if getattr(teacher, key) is not None]
    if keys not in _REACHED_BY:
        found = " and ".join(keys) or "neither model, url, adapter nor student"
        expected = "model, or url and model, or adapter with or without model, or student"
        if keys == ["url"]:
            yield RecipeError(path, "url without model", expected, "set model to its name on that server")
        elif "url" in keys and "adapter" in keys:
            advice = "a server has adapters under names of their own: set model to that name, without adapter"
            yield RecipeError(path, found, expected, advice)
        else:
            yield RecipeError(path, found, expected, "a teacher is reached in one way")
        return
    yield from check_url(path, teacher.url)
    yield from check_device(path, teacher.device)
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
        reached = teacher.model or teacher.adapter or teacher.url or teacher.student
        if twin is not None and reached:
            yield RecipeError(
                f"teachers.{name}",
                f"the same teacher as {twin}",
                "teachers that differ in model, adapter, url, student, before, tokenizer or dtype",
                f"remove {name}, and let route.to send its prompts to {twin}",
            )
        seen.append((name, identity))


def _targets(recipe: Recipe) -> Iterator[RecipeError]:
    """Every problem of products of teachers."""
    for name, teacher in recipe.teachers.items():
        path, target = f"teachers.{name}.target", teacher.target or {}
        if teacher.target is None:
            continue
        if unknown := [other for other in target if other not in recipe.teachers]:
            expected = f"exponents of {', '.join(recipe.teachers)}"
            yield RecipeError(path, f"no teacher {unknown[0]}", expected, "add it to teachers")
        elif abs(math.fsum(target.values()) - 1) > 1e-6:
            found, advice = f"a sum of {math.fsum(target.values()):g}", "a base enters with a negative one"
            yield RecipeError(path, found, "exponents whose sum is 1", advice)
        elif apart := [other for other in target if recipe.teachers[other].placement != "colocated"]:
            found = f"{apart[0]}, which is not colocated"
            yield RecipeError(path, found, "colocated teachers", "remove the placement")
    signal = None if recipe.distill is None else recipe.distill.signal
    if recipe.teacher_targets and signal not in (None, "full"):
        advice = "the tail of a product is not the product of the tails: set distill.signal: full"
        found = f"{signal} with teachers.{next(iter(recipe.teacher_targets))}.target"
        yield RecipeError("distill.signal", found, "full", advice)


def _plain(value: object) -> object:
    return value.rstrip("/") if isinstance(value, str) else value


def _engines(recipe: Recipe) -> Iterator[RecipeError]:
    by_vllm = [
        n for n, teacher in recipe.teachers.items() if teacher.url is None and teacher.engine == "vllm"
    ]
    for name in by_vllm:
        teacher = recipe.teachers[name]
        on_student = teacher.adapter is not None and teacher.model is None
        if (recipe.model.dtype if on_student else teacher.dtype) == "float64":
            found, key = "float64 with engine vllm", "model" if on_student else f"teachers.{name}"
            yield RecipeError(f"{key}.dtype", found, "float32 or bfloat16")
        if teacher.student is not None and recipe.model.lora is not None:
            found, advice = "vllm with a copy of a student that has an adapter", "set its engine to torch"
            yield RecipeError(f"teachers.{name}.engine", found, "torch", advice)
    if by_vllm and recipe.distill is not None and recipe.distill.signal == "full":
        advice = "vLLM gives no hidden states: set distill.signal to top_k or sampled, or its engine to torch"
        found = f"full with teachers.{by_vllm[0]}.engine vllm"
        yield RecipeError("distill.signal", found, "top_k or sampled", advice)
    if by_vllm and model_traits(recipe.model).vision:
        advice = "pictures are seen by the torch engine only"
        found = "vllm with a student that sees pictures"
        yield RecipeError(f"teachers.{by_vllm[0]}.engine", found, "torch", advice)
