"""Show a recipe with the origins of its values, and write the reference of all keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from practicum.recipe.checks.unread_keys import unread_notes
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text import yamlfile
from practicum.recipe.text.origins import DEFAULT
from practicum.recipe.text.type_text import find_key, keys_of, sections_of, step_name, takes


def resolved_yaml(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML, which loads to the same recipe from any folder."""
    return yamlfile.dump(recipe.model_dump(mode="json", exclude={"extends"}))


def show_recipe(loaded: LoadedRecipe) -> str:
    """Return the resolved recipe as YAML. Comments have each value's origin, or why it is not read."""
    lines = list(_lines(loaded.recipe.model_dump(mode="json"), "", "", origin_notes(loaded)))
    width = min(60, max(len(text) for text, _ in lines))
    return "\n".join(text if comment is None else f"{text:<{width}}  # {comment}" for text, comment in lines)


def origin_notes(loaded: LoadedRecipe) -> dict[str, str]:
    """Return the origin of each value, and why it is not read, by dotted path."""
    notes = {path: str(origin) for path, origin in loaded.origins.items()}
    for path, why in unread_notes(loaded.recipe).items():
        for leaf in notes:
            if leaf == path or leaf.startswith(f"{path}."):
                notes[leaf] += f", {why}"
    return notes


def _lines(
    data: Mapping[str, Any], path: str, indent: str, comments: Mapping[str, str]
) -> Iterator[tuple[str, str | None]]:
    for key, value in data.items():
        here = f"{path}.{key}" if path else key
        if here == "extends" and value is None:
            continue
        name = yamlfile.dump(key, flow=True)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:", None
            yield from _lines(value, here, indent + "  ", comments)
        else:
            yield f"{indent}{name}: {yamlfile.dump(value, flow=True)}", comments.get(here, str(DEFAULT))


def markdown() -> str:
    """Return the reference in Markdown, with one table of keys per section."""
    return "\n".join(["# The recipe", "", *_section(Recipe, "")]).rstrip("\n") + "\n"


def json_schema() -> str:
    """Return the JSON schema of a recipe, for editors."""
    return json.dumps(Recipe.model_json_schema(), indent=2)


def _section(section: type[BaseModel], path: str) -> Iterator[str]:
    if path:
        yield from (f"## {path}", "")
    yield from ((section.__doc__ or "").strip(), "", "| key | takes | default | about |")
    yield "|---|---|---|---|"
    prefix = f"{path}." if path else ""
    inner = []
    nodes = keys_of(find_key((), section)[2], section)
    for name, info in section.model_fields.items():
        cells = [f"`{prefix}{name}`", takes(nodes[name], section), _default(info), info.description or ""]
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
        step = prefix + step_name(info.annotation, name)
        inner += [(child, step) for child in sections_of(info.annotation)]
    yield ""
    for child, child_path in inner:
        yield from _section(child, child_path)


def _default(info: FieldInfo) -> str:
    value: Any = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "**required**"
    if isinstance(value, BaseModel):
        return "see below"
    return f"`{yamlfile.dump(TypeAdapter(Any).dump_python(value, mode='json'), flow=True)}`"
