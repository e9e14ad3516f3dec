"""Describe the types of recipe keys from the JSON schema, and find keys by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from inspect import get_annotations
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from practicum.recipe.schema.recipe import Recipe

Path = tuple[str | int, ...]
Node = dict[str, Any]
"""The JSON schema of a key, or of an item of a list or mapping."""
_ONE = {"integer": "an integer", "number": "a number", "string": "a string", "boolean": "true or false"}
_MANY = {"integer": "integers", "number": "numbers", "string": "strings", "object": "mappings"}
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "greater than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minItems": "with at least {} of them",
    "minProperties": "with at least {} of them",
}


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a key may hold: directly, in a union, or as items of a list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for kind in get_args(annotation) for section in sections_of(kind)]


def step_name(annotation: Any, name: str) -> str:
    """Return a key as a step of a path: tasks.<name> for mappings, functions[] for lists of sections."""
    kinds = {get_origin(kind) for kind in (annotation, *get_args(annotation))}
    if not sections_of(annotation):
        return name
    return f"{name}.<name>" if dict in kinds else f"{name}[]" if list in kinds else name


def all_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every key with its dotted path, sections before their keys."""
    for name, info in section.model_fields.items():
        yield prefix + name, info
        inside = f"{prefix}{step_name(info.annotation, name)}."
        keys = {path: key for inner in sections_of(info.annotation) for path, key in all_keys(inner, inside)}
        yield from keys.items()


def recipe_keys(section: type[BaseModel] = Recipe) -> set[str]:
    """Return every key as Section.key. Sections that several keys hold or inherit count once."""
    keys: set[str] = set()
    for name, info in section.model_fields.items():
        owner = next(c for c in reversed(section.__mro__) if name in get_annotations(c))
        keys |= {f"{owner.__name__}.{name}"}.union(*map(recipe_keys, sections_of(info.annotation)))
    return keys


def choices(annotation: Any) -> list[str]:
    """Return the allowed words of a key that is a choice or has one in its union."""
    kinds = get_args(annotation)
    return list(kinds) if get_origin(annotation) is Literal else [w for kind in kinds for w in choices(kind)]


def nearest(word: str, among: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the closest match of a misspelt word, or None."""
    return next(iter(difflib.get_close_matches(word, list(among), n=1, cutoff=cutoff)), None)


@cache
def _schema(root: type[BaseModel]) -> Node:
    return root.model_json_schema()


def forms_of(node: Node, root: type[BaseModel] = Recipe) -> list[Node]:
    """Return the members of a union except null, or the type itself."""
    if "$ref" in node:
        return forms_of(_schema(root)["$defs"][node["$ref"].rpartition("/")[2]], root)
    if "anyOf" in node:
        return [form for inner in node["anyOf"] for form in forms_of(inner, root)]
    return [] if node.get("type") == "null" else [node]


def kinds_of(node: Node) -> list[Node]:
    """Return the types that a key declares, except null."""
    return [kind for kind in node.get("anyOf", [node]) if kind.get("type") != "null"]


def keys_of(node: Node, root: type[BaseModel] = Recipe) -> Node:
    """Return the keys of a section, or of all sections in a union."""
    return {name: key for form in forms_of(node, root) for name, key in form.get("properties", {}).items()}


def find_key(
    location: Sequence[str | int], root: type[BaseModel] = Recipe, *, tagged: bool = True
) -> tuple[Path, Path | None, Node]:
    """Return path, union and schema of a location. `tagged` ones name a union's member, as pydantic's do."""
    node, path, union = _schema(root), (), None
    for step in location:
        if tagged and path != union and len(kinds_of(node)) > 1:
            union = path
            continue
        inner = [_step_into(form, step) for form in forms_of(node, root)]
        node, path = next((child for child in inner if child is not None), {}), (*path, step)
    return path, union, node


def _step_into(form: Node, step: str | int) -> Node | None:
    if isinstance(step, int):
        items = form.get("prefixItems", ())
        return items[step] if step < len(items) else form.get("items")
    others = form.get("additionalProperties")
    return form.get("properties", {}).get(step, others if isinstance(others, dict) else None)


def takes(node: Node, root: type[BaseModel] = Recipe) -> str:
    """Describe the values of a key, such as 'an integer, at least 0' or 'one of k1, k2'."""
    if "anyOf" in node:
        kinds = kinds_of(node)
        words = [takes(kind, root) for kind in kinds]
        if len(kinds) > 1:  # sections by how they are written: {own: …}
            first = [next(iter(keys_of(kind, root)), "") for kind in kinds]
            words = [f"{{{key}: …}}" if key else text for key, text in zip(first, words, strict=True)]
        if words[-1] == "a string" and "enum" in kinds[0]:
            words[-1] = "package.module:name"
        return ", or ".join(words if kinds == node["anyOf"] else [*words, "null"])
    if words := node.get("enum", [node["const"]] if "const" in node else []):
        return f"{'one of ' if len(words) > 1 else ''}{', '.join(words)}"
    kind, text = node.get("type"), "any value"
    if kind == "array":
        if items := node.get("prefixItems"):
            return f"a list of {len(items)} {_many(items[0])}"
        text = f"a list of {_many(node['items'])}"
    elif kind == "object" or "$ref" in node:
        names = node.get("additionalProperties")
        text = f"a mapping of names to {_many(names)}" if isinstance(names, dict) else "a mapping"
    return ", ".join([_ONE.get(str(kind), text), *_bounds(node)])


def _many(node: Node) -> str:
    if "$ref" in node:
        return re.sub(r"\B([A-Z])", r" \1", node["$ref"].rpartition("/")[2]).lower() + "s"
    if "anyOf" in node:
        return " or ".join(map(_many, node["anyOf"]))
    return ", each ".join([_MANY.get(node.get("type", ""), "values"), *_bounds(node)])


def _bounds(node: Node) -> list[str]:
    words = [text.format(node[name]) for name, text in _BOUNDS.items() if name in node]
    return [" and ".join(words)] if words else []
