"""The resolved recipe as text: with origins for people, without for the run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text import yamlfile
from practicum.recipe.text.origins import DEFAULT, Origin


def resolved_yaml(recipe: Recipe) -> str:
    """Every value as YAML that stands on its own: loads to the same recipe, from any folder."""
    return yamlfile.dump(recipe.model_dump(mode="json", exclude={"extends"}))


def show_recipe(loaded: LoadedRecipe) -> str:
    """Every value with a comment that says where it came from; valid YAML itself."""
    lines = list(_lines(loaded.recipe.model_dump(mode="json"), "", "", loaded.origins))
    width = min(60, max(len(text) for text, _ in lines))
    return "\n".join(text if origin is None else f"{text:<{width}}  # {origin}" for text, origin in lines)


def _lines(
    data: Mapping[str, Any], path: str, indent: str, origins: Mapping[str, Origin]
) -> Iterator[tuple[str, Origin | None]]:
    for key, value in data.items():
        here = f"{path}.{key}" if path else key
        if here == "extends" and value is None:
            continue
        name = yamlfile.dump(key, flow=True)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:", None
            yield from _lines(value, here, indent + "  ", origins)
        else:
            text = f"{indent}{name}: {yamlfile.dump(value, flow=True)}"
            yield text, origins.get(here, DEFAULT)
