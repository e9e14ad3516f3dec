"""The reference of the recipe, written from its types, so that it can't drift from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text import yamlfile
from practicum.recipe.text.type_text import expected, section_of, step_name


def markdown() -> str:
    """One table per section: key, what it takes, default, sentence."""
    return "\n".join(["# The recipe", "", *_section(Recipe, "")]).rstrip("\n") + "\n"


def json_schema() -> str:
    """JSON schema of a recipe, for editors."""
    return json.dumps(Recipe.model_json_schema(), indent=2)


def _section(section: type[BaseModel], path: str) -> Iterator[str]:
    if path:
        yield from (f"## {path}", "")
    yield from ((section.__doc__ or "").strip(), "", "| key | takes | default | about |")
    yield "|---|---|---|---|"
    prefix = f"{path}." if path else ""
    inner = []
    for name, info in section.model_fields.items():
        child = section_of(info.annotation)
        cells = [f"`{prefix}{name}`", expected(info), _default(info), info.description or ""]
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
        if child is not None:
            inner.append((child, prefix + step_name(info.annotation, name)))
    yield ""
    for child, child_path in inner:
        yield from _section(child, child_path)


def _default(info: FieldInfo) -> str:
    value: Any = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "**required**"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, list | tuple):
        value = [v.model_dump(mode="json") if isinstance(v, BaseModel) else v for v in value]
    return f"`{yamlfile.dump(value, flow=True)}`"
