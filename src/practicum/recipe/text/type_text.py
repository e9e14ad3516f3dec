"""The recipe's types in words: what a key takes, where keys live, what a misspelt one meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from practicum.recipe.schema.recipe import Recipe

NAME = "<name>"
OWN_NAME = "package.module:name"
_SECTIONS = {"Task": "tasks", "Teacher": "teachers", "RewardModel": "reward models"}
_SIMPLE = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def unwrap(annotation: Any) -> tuple[Any, bool]:
    """The type behind `X | None` and Annotated, and whether null is allowed; `X | Y` stays a union."""
    if get_origin(annotation) is Annotated:
        return unwrap(get_args(annotation)[0])
    if not _is_union(annotation):
        return annotation, False
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    nullable = len(kinds) < len(get_args(annotation))
    return (unwrap(kinds[0])[0] if len(kinds) == 1 else Union[*kinds]), nullable


def forms_of(annotation: Any) -> list[Any]:
    """The types that a value may have, null aside: several for a union, else one."""
    kind, _ = unwrap(annotation)
    return [unwrap(form)[0] for form in get_args(kind)] if _is_union(kind) else [kind]


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, directly, as a form of several, or as items of a list or mapping."""
    for kind in forms_of(annotation):
        if _is_section(kind):
            return kind
        if get_origin(kind) in (list, dict) and (inner := section_of(get_args(kind)[-1])):
            return inner
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
    """The words a key may be, if it is a choice (or has a choice among its forms)."""
    kinds = [kind for kind in forms_of(annotation) if get_origin(kind) is Literal]
    return [str(word) for kind in kinds for word in get_args(kind)]


def takes_own(annotation: Any) -> bool:
    """Whether a key is a choice that may also name a part of the user's."""
    return str in forms_of(annotation) and bool(choices(annotation))


def type_words(annotation: Any) -> str:
    """A type for people: 'a whole number', 'one of k1, k2, k3', 'a list of text'."""
    forms = forms_of(annotation)
    if takes_own(annotation):
        words = choices(annotation)
        return f"{'one of ' if len(words) > 1 else ''}{', '.join(words)}, or {OWN_NAME}"
    if len(forms) > 1:
        return ", or ".join(_form_words(form) for form in forms)
    kind = forms[0]
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
        return "a mapping" + (f" of names to {_plural(items[1])}" if items[1] is not Any else "")
    return "a mapping" if section_of(kind) else "any value"


def expected(info: FieldInfo) -> str:
    """All that a key takes: type, bounds, null."""
    return expected_type(info.annotation, info.metadata)


def expected_type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """`expected` for a type that is not a key of its own, such as the items of a list."""
    if get_origin(annotation) is Annotated:
        metadata = getattr(get_args(annotation)[1], "metadata", ())
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


class Spot(NamedTuple):
    """A place in the recipe: its path, its key (none for items) and the type there.

    `union` is the path of the value with several forms that the place is in, or is.
    """

    path: tuple[str | int, ...]
    info: FieldInfo | None
    kind: Any
    union: tuple[str | int, ...] | None


def find_key(location: Sequence[str | int], root: type[BaseModel] = Recipe) -> Spot:
    """The place that pydantic, or a path, names; below lists and mappings the kind is an item's.

    Pydantic's locations name a union's form after the union's path; paths do not.
    """
    info, kind, path, union, whole = None, root, (), None, None
    for step in location:
        forms = forms_of(kind)
        if len(forms) > 1:
            named = [form for form in forms if _is_tag(step, form)]
            if named and union is None:
                whole, union, kind = kind, path, named[0]
                continue
            forms = [form for form in forms if _is_section(form) or get_args(form)][-1:]
        info, kind = _step_into(forms[0], step)
        path = (*path, step)
    return Spot(path, info, whole if path == union else kind, union)


def _step_into(kind: Any, step: str | int) -> tuple[FieldInfo | None, Any]:
    items = get_args(kind)
    if _is_section(kind):
        info = kind.model_fields.get(str(step))
        return info, info.annotation if info else Any
    if get_origin(kind) is tuple and isinstance(step, int) and step < len(items):
        return None, items[step]
    return None, items[-1] if items else Any


def _is_tag(step: str | int, form: Any) -> bool:
    """Whether pydantic's location names a form of a union so: Section, str, literal[…], dict[…]."""
    if form is str and str(step).startswith("function-after["):
        return True
    if _is_section(form) or form in _SIMPLE:
        return step == form.__name__
    origin: Any = get_origin(form)
    kind = {Literal: "literal"}.get(origin, getattr(origin, "__name__", ""))
    return str(step).startswith(f"{kind}[")


def _is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _form_words(form: Any) -> str:
    """One form of several: its words without 'one of', a section by how it is written."""
    return ", ".join(choices(form)) or (_shape(form) if _is_section(form) else type_words(form))


def _shape(section: type[BaseModel]) -> str:
    """How a section is written: {own: {replicas: …}}."""
    name, info = next(iter(section.model_fields.items()))
    inner = section_of(info.annotation)
    return f"{{{name}: {_shape(inner) if inner else '…'}}}"


def _plural(annotation: Any) -> str:
    forms = forms_of(annotation)
    if len(forms) > 1:
        return " or ".join(_plural(form) for form in forms)
    kind = forms[0]
    if _is_section(kind):
        return _SECTIONS.get(kind.__name__, "mappings")
    if get_origin(kind) is dict:
        return f"mappings of names to {_plural(get_args(kind)[1])}"
    plural = {int: "whole numbers", float: "numbers", str: "text"}.get(kind, "values")
    if get_origin(annotation) is Annotated:
        rules = getattr(get_args(annotation)[1], "metadata", ())
        bounds = [words for rule in rules if (words := _bound(rule))]
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
