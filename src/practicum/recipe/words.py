"""The recipe's types in words: what a key takes, where keys live, what a misspelt one meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from practicum.recipe.schema import Recipe

NAME = "<name>"
_SIMPLE = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def unwrap(annotation: Any) -> tuple[Any, bool]:
    """The type behind `X | None` and Annotated, and whether null is allowed."""
    if get_origin(annotation) is Annotated:
        return unwrap(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        assert len(kinds) == 1, f"recipes hold one type or null, not {annotation}"
        return unwrap(kinds[0])[0], True
    return annotation, False


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, directly, or as the items of a list or mapping."""
    kind, _ = unwrap(annotation)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    if get_origin(kind) in (list, dict):
        return section_of(get_args(kind)[-1])
    return None


def step_name(annotation: Any, name: str) -> str:
    """A key as paths write it: tasks.<name> for mappings, functions[] for lists of sections."""
    kind, _ = unwrap(annotation)
    if section_of(annotation) is None:
        return name
    return name + {dict: f".{NAME}", list: "[]"}.get(get_origin(kind) or kind, "")


def all_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key there is with its dotted path, sections before what they hold."""
    for name, info in section.model_fields.items():
        yield prefix + name, info
        inner = section_of(info.annotation)
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{step_name(info.annotation, name)}.")


def choices(annotation: Any) -> list[str]:
    """The words a key may be, if it is a choice."""
    kind, _ = unwrap(annotation)
    return [str(word) for word in get_args(kind)] if get_origin(kind) is Literal else []


def type_words(annotation: Any) -> str:
    """A type for people: 'a whole number', 'one of k1, k2, k3', 'a list of text'."""
    kind, _ = unwrap(annotation)
    if words := choices(kind):
        return f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    items = get_args(kind)
    if get_origin(kind) is list:
        return f"a list of {_plural(items[0])}"
    if get_origin(kind) is tuple:
        return f"a list of {len(items)} {_plural(items[0])}"
    if get_origin(kind) is dict:
        return "a mapping" + (f" of names to {_plural(items[1])}" if section_of(items[1]) else "")
    return "a mapping" if section_of(kind) else "any value"


def expected(info: FieldInfo) -> str:
    """All that a key takes: type, bounds, null."""
    return expected_type(info.annotation, info.metadata)


def expected_type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """`expected` for a type that is not a key of its own, such as the items of a list."""
    if get_origin(annotation) is Annotated:
        metadata = get_args(annotation)[1].metadata
    parts = [type_words(annotation)]
    if bounds := [words for rule in metadata if (words := _bound(rule))]:
        parts.append(" and ".join(bounds))
    if unwrap(annotation)[1]:
        parts.append("or null")
    return ", ".join(parts)


def nearest(word: str, among: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The likeliest meaning of a misspelt word."""
    close = difflib.get_close_matches(word, list(among), n=1, cutoff=cutoff)
    return close[0] if close else None


def find_key(path: Sequence[str | int]) -> tuple[FieldInfo | None, Any]:
    """The key at a path of pydantic, and the type there (an item's, below lists and mappings)."""
    info, kind = None, Recipe
    for step in path:
        inner, _ = unwrap(kind)
        items = get_args(inner)
        info = None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            info = inner.model_fields.get(str(step))
            kind = info.annotation if info else Any
        elif get_origin(inner) is tuple and isinstance(step, int) and step < len(items):
            kind = items[step]
        else:
            kind = items[-1] if items else Any
    return info, kind


def _plural(annotation: Any) -> str:
    section = section_of(annotation)
    if section is not None:
        return "mappings" if section.__name__ != "Task" else "tasks"
    kind, _ = unwrap(annotation)
    plural = {int: "whole numbers", float: "numbers", str: "text"}.get(kind, "values")
    if get_origin(annotation) is Annotated:
        bounds = [words for r in get_args(annotation)[1].metadata if (words := _bound(r))]
        return f"{plural}, each {' and '.join(bounds)}" if bounds else plural
    return plural


def _bound(rule: Any) -> str | None:
    match rule:
        case Ge(ge=value):
            return f"at least {value}"
        case Gt(gt=value):
            return f"greater than {value}"
        case Le(le=value):
            return f"at most {value}"
        case Lt(lt=value):
            return f"less than {value}"
        case MinLen(min_length=length):
            return f"with at least {length} of them"
        case _:
            return None
