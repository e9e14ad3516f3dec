"""Whether the teachers of a student that sees can see the same."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from practicum.errors import RecipeError
from practicum.models.model_files import read_config, read_image_processor
from practicum.models.processor import load_processor
from practicum.models.vision import is_vision
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Teacher

_CUTTING = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std", "size")
"""What decides how a picture becomes patches."""


def check_sight(recipe: Recipe, student: PreTrainedTokenizerBase) -> Iterator[RecipeError]:
    """Teachers are shown the student's patches: each must be a vision model that cuts pictures alike."""
    processor = load_processor(recipe.model, student)
    if processor is None:
        return
    own = _cutting(processor.image_processor)
    for name, teacher in recipe.teachers.items():
        if teacher.student is None:
            yield from _check_one(f"teachers.{name}", teacher, own)


def _check_one(path: str, teacher: Teacher, own: dict[str, str]) -> Iterator[RecipeError]:
    if teacher.url is not None:
        expected = "a model here, for a student that sees pictures"
        yield RecipeError(f"{path}.url", teacher.url, expected, f"load it with {path}.model alone")
        return
    assert teacher.model is not None
    try:
        config, cutter = read_config(teacher.model), None
        if is_vision(config):
            cutter = read_image_processor(teacher.model)
    except (OSError, ValueError) as error:
        yield RecipeError(f"{path}.model", teacher.model, "a vision model", str(error).splitlines()[0])
        return
    if cutter is None:
        yield RecipeError(
            f"{path}.model", f"{teacher.model}, a {config.model_type}", "a vision model, as the student is"
        )
        return
    theirs = _cutting(cutter)
    differ = [key for key in _CUTTING if own[key] != theirs[key]]
    if differ:
        found = ", ".join(f"{key} {theirs[key]}" for key in differ)
        expected = "the student's " + ", ".join(f"{key} {own[key]}" for key in differ)
        yield RecipeError(f"{path}.model", f"an image processor with {found}", expected)


def _cutting(cutter: object) -> dict[str, str]:
    return {key: str(getattr(cutter, key, None)) for key in _CUTTING}
