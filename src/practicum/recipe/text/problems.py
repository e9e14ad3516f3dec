"""Turn pydantic's errors into RecipeErrors with path, found value, expected value and suggestion."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from practicum.errors import RecipeError
from practicum.recipe.own_parts import registered_names
from practicum.recipe.schema.other_trainers import equivalent_key, equivalent_value
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.removed_keys import REMOVED
from practicum.recipe.text.origins import Origin
from practicum.recipe.text.type_text import (
    Node,
    Path,
    all_keys,
    find_key,
    forms_of,
    keys_of,
    kinds_of,
    nearest,
    takes,
)
from practicum.recipe.user_functions import meant

_YES_NO = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_NUMBER = re.compile(r"\s*[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?\s*", re.IGNORECASE)


def explain(
    error: ValidationError, origins: Mapping[str, Origin], root: type[BaseModel] = Recipe
) -> list[RecipeError]:
    """Return every problem of a validation, of a recipe or of another file with the model `root`.

    Pydantic reports each member of a union. If the value has a member's shape, the problems inside that
    member are returned. A value of another shape, or a list with too few items, is one problem.
    """
    located = []
    for details in error.errors(include_url=False):
        path, union, node = find_key(details["loc"], root)
        if details["type"] == "missing" and isinstance(path[-1], int):
            details["type"], (path, union, node) = "too_short", find_key(details["loc"][:-1], root)
        located.append((path, union, node, details))
    inside = {union for path, union, *_ in located if path != union}
    # The union and the name of its form that a problem is in, or () outside of unions.
    forms = [tuple(d["loc"][: len(u) + 1]) if u and path != u else () for path, u, _, d in located]
    strangers = {
        form
        for form, (path, union, _, details) in zip(forms, located, strict=True)
        if details["type"] == "extra_forbidden" and len(path) == len(union or ()) + 1
    }
    meant_unions = {form[:-1] for form in forms if form and form not in strangers}
    problems: dict[Path, RecipeError] = {}
    for form, (path, union, node, details) in zip(forms, located, strict=True):
        if form in strangers and form[:-1] in meant_unions:
            continue  # the value has keys of another form
        if path not in problems and (path != union or path not in inside):
            problem = _explain(path, node, details["type"], details["input"], root)
            problems[path] = problem if details["type"] == "missing" else with_origin(problem, origins)
    return list(problems.values())


_REMOVED = {re.compile(re.escape(key).replace(r"\*", "[^.]+")): advice for key, advice in REMOVED.items()}


def removed_keys(data: Any, path: Path = ()) -> Iterator[RecipeError]:
    """Yield an error with advice for each key of older versions in a recipe's data."""
    pairs: Iterable[tuple[Any, Any]] = data.items() if isinstance(data, Mapping) else ()
    for step, value in enumerate(data) if isinstance(data, list) else pairs:
        here = (*path, step)
        key = ".".join(map(str, here))
        if advice := next((advice for old, advice in _REMOVED.items() if old.fullmatch(key)), None):
            yield RecipeError(dotted(here), "a removed key", "no such key", advice)
        else:
            yield from removed_keys(value, here)


def dotted(path: Sequence[str | int]) -> str:
    """Format a path, as in reward.functions[0].weight."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or "the file"


def shorten(value: Any, limit: int = 60) -> str:
    """Return repr of a value, cut to one line, with YAML's spelling of true, false and null."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def with_origin(problem: RecipeError, origins: Mapping[str, Origin]) -> RecipeError:
    """Return the problem with the origins of the value that was found, or of the list that contains it."""
    path = re.sub(r"\[(\d+)\]", r".\1", problem.path)
    parts: dict[tuple[str, str], Origin] = {}
    for key, origin in origins.items():
        if key == path or key.startswith(f"{path}."):
            parts.setdefault((origin.kind, origin.file), origin)
    while not parts and path:
        path = path.rpartition(".")[0]
        parts = {("", ""): origins[path]} if path in origins else {}
    found = f"{problem.found} ({' and '.join(map(str, parts.values()))})" if parts else problem.found
    return RecipeError(problem.path, found, problem.expected, problem.suggestion)


def unknown_key(path: Sequence[str | int], root: type[BaseModel], value: Any = None) -> tuple[str, str]:
    """Return the expected keys and a suggestion for a key that does not exist."""
    *parent, last = path
    word, level = str(last), dotted(parent) if parent else ""
    valid, prefix = list(keys_of(find_key(parent, root, tagged=False)[2], root)), f"{level}." if level else ""
    where = f"a key of {level}" if level else f"a key of the {'recipe' if root is Recipe else 'file'}"
    known = sorted((key for key, _ in all_keys(root)), key=lambda key: key.count("."))
    by_word: dict[str, list[str]] = {}
    for key in known:
        by_word.setdefault(key.rpartition(".")[2], []).append(key)
    if root is Recipe and level != "distill" and (other := equivalent_key(dotted(path), value, by_word)):
        return where, other
    if word in by_word:
        return where, f"did you mean {' or '.join(by_word[word][:3])}?"
    if close := nearest(word, valid):
        return where, f"did you mean {prefix}{close}?"
    if close := nearest(word, by_word, cutoff=0.75):
        return where, f"did you mean {by_word[close][0]}?"
    return f"{where}: {', '.join(valid)}", "`practicum schema` lists every key" if root is Recipe else ""


def _explain(path: Path, node: Node, kind: str, value: Any, root: type[BaseModel]) -> RecipeError:
    key = dotted(path)
    if kind == "extra_forbidden":
        return RecipeError(key, "an unknown key", *unknown_key(path, root, value))
    expected = takes(node, root)
    if kind == "missing":
        sentence = node.get("description", "").rstrip(".")
        return RecipeError(key, "nothing", f"{expected} ({sentence})", f"add the key {key}")
    return RecipeError(key, shorten(value), expected, _advice(node, value, key, root))


def _advice(node: Node, value: Any, path: str, root: type[BaseModel]) -> str:
    if root is Recipe and (other := equivalent_value(path, value)):
        return other
    forms, section = forms_of(node, root), keys_of(node, root)
    if isinstance(value, str) and re.fullmatch(r"model|(teachers|tasks)\.[^.]+", path):
        name = {"model": "path", "teachers": "model"}.get(path.partition(".")[0])
        return f"write {path}: {{{name or ('kind' if value.isidentifier() else 'dataset')}: {value}}}"
    if section and len(kinds_of(node)) == 1:
        keys = f"its keys are {', '.join(section)}"
        way = f"remove {path}" if "default" in node else "write {}"
        return keys if value is not None else f"{way} to take the defaults; {keys}"
    if words := [word for form in forms for word in form.get("enum", ())]:
        if {"type": "string"} in forms:
            return meant(str(value), [*words, *registered_names(path)])
        close = nearest(str(value), words)
        return f"did you mean {close}?" if close else ""
    kinds = {form.get("type") for form in forms}
    if kinds == {"boolean"} and str(value).lower() in _YES_NO:
        return f"write {_YES_NO[str(value).lower()]}"
    if kinds <= {"integer", "number"} and isinstance(value, str) and _NUMBER.fullmatch(value):
        hint = "write it with a dot (1.0e-4): YAML 1.1 reads 1e-4 as a string"
        return hint if "e" in value.lower() and "." not in value else "remove the quotes"
    if kinds == {"string"} and isinstance(value, int | float):
        return "put it in quotes"
    if isinstance(value, dict) and kinds == {"array"}:
        return f"write the whole list: --set '{path}=[…]'"
    return ""
