"""Merge layers of recipes, and keep the origin of each value."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a value: default, a base, the recipe's file or dict, or --set. Files come with the line."""

    kind: Literal["default", "base", "file", "dict", "--set"]
    file: str = ""
    line: int | None = None

    def __str__(self) -> str:
        words = f"base {self.file}" if self.kind == "base" else self.kind
        return words if self.line is None else f"{words}:{self.line}"


DEFAULT = Origin("default")

# Keys that replace one another, each with the keys that depend on it.
_ALTERNATIVES: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {
    ("model",): {"path": ("tokenizer",), "random_init": ()},
    ("tasks", "*"): {
        "kind": ("options",),
        "file": ("eval_file", "map", "prompt", "answer"),
        "dataset": ("subset", "split", "eval_split", "map", "prompt", "answer"),
    },
    ("agent", "loop"): {"command": (), "function": ()},
    ("teachers", "*"): {
        "model": ("url", "adapter", "tokenizer", "dtype", "device", "concurrency", "api_key_env"),
        "student": (),
    },
}
# Mappings with names chosen by the user, in which null removes an entry.
_NAMED = (("tasks",), ("teachers",), ("reward", "models"), ("route", "map"), ("route", "shares"))


class Layers:
    """Plain data merged from layers, of which later ones override earlier ones, and the origin of each leaf.

    Mappings are merged. Everything else is replaced, including the weights of teachers in route.map. A key
    that replaces another (model.random_init for model.path, a task's file for its kind) removes it. `tasks.x:
    null` removes a task. Teachers, reward models and entries of a route are removed in the same way.
    """

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}

    def add(self, layer: Mapping[str, Any], origin: Origin, lines: Mapping[str, int] | None = None) -> None:
        """Merge another layer into the data. `lines` maps dotted paths to line numbers."""
        self._merge(self.data, spelled_out((), layer), (), origin, lines or {})

    def _merge(
        self,
        data: dict[str, Any],
        layer: Mapping[str, Any],
        path: tuple[str, ...],
        origin: Origin,
        lines: Mapping[str, int],
    ) -> None:
        self._drop_replaced(data, layer, path)
        for key, value in layer.items():
            here = (*path, key)
            old = data.get(key)
            if isinstance(value, dict) and isinstance(old, dict) and path != ("route", "map"):
                if value:
                    self.origins.pop(".".join(here), None)
                self._merge(old, value, here, origin, lines)
                continue
            self._forget(here)
            if value is None and path in _NAMED and key in data:
                del data[key]
                continue
            data[key] = copy.deepcopy(value)
            for leaf, _ in leaves(value, ".".join(here)):
                # An expanded short form has the line of its section.
                line = lines.get(leaf, lines.get(leaf.rpartition(".")[0]))
                self.origins[leaf] = replace(origin, line=line)

    def _drop_replaced(self, data: dict[str, Any], layer: Mapping[str, Any], path: tuple[str, ...]) -> None:
        place = (path[0], "*") if len(path) == 2 and path[:1] in _NAMED else path
        alternatives = _ALTERNATIVES.get(place, {})
        chosen = [key for key in alternatives if layer.get(key) is not None]
        if len(chosen) != 1:
            return
        for key, companions in alternatives.items():
            if key != chosen[0] and data.get(key) is not None:
                for gone in (key, *companions):
                    data.pop(gone, None)
                    self._forget((*path, gone))

    def _forget(self, path: tuple[str, ...]) -> None:
        dotted = ".".join(path)
        for key in [k for k in self.origins if k == dotted or k.startswith(dotted + ".")]:
            del self.origins[key]


def spelled_out(path: tuple[str, ...], value: Any) -> Any:
    """Expand short forms: `runtime: ray` is {kind: ray}, and `reward: exact` and `reward: {functions:
    [exact]}` are {functions: [{use: exact}]}, as in a task's rewards."""
    if isinstance(value, str) and path in (("runtime",), ("checks",)):
        return {"kind" if path == ("runtime",) else "level": value}
    if path == ("reward",) and isinstance(value, str | list):
        value = {"functions": value}
    if path == ("reward", "functions") or (path[:1] == ("tasks",) and path[2:] == ("rewards",)):
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list):
            return [{"use": item} if isinstance(item, str) else item for item in items]
        return items
    if isinstance(value, Mapping):
        return {key: spelled_out((*path, key), inner) for key, inner in value.items()}
    return value


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value of every leaf. Lists and empty mappings are leaves."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def differences(one: Any, two: Any, path: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the dotted paths at which two recipes differ, with both values."""
    if isinstance(one, dict) and isinstance(two, dict):
        for name in dict.fromkeys([*one, *two]):
            yield from differences(one.get(name), two.get(name), f"{path}.{name}" if path else str(name))
    elif one != two:
        yield path, (one, two)
