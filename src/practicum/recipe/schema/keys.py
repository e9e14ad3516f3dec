"""The keys of the recipe, counted once where a section declares them."""

from __future__ import annotations

from inspect import get_annotations

from pydantic import BaseModel

from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text.type_text import section_of


def recipe_keys(section: type[BaseModel] = Recipe) -> set[str]:
    """Return every key as Section.key. Sections that several keys hold, or inherit from, count once."""
    keys: set[str] = set()
    for name, info in section.model_fields.items():
        owner = next(c for c in reversed(section.__mro__) if name in get_annotations(c))
        keys.add(f"{owner.__name__}.{name}")
        if inner := section_of(info.annotation):
            keys |= recipe_keys(inner)
    return keys
