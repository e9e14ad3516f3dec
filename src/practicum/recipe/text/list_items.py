"""--set of a value inside a list: `reward.functions.0.weight=0.5`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from practicum.errors import RecipeError
from practicum.recipe.text.origins import DEFAULT, OVERRIDE, Layers
from practicum.recipe.text.type_text import find_key


def set_item(layers: Layers, steps: Sequence[str], value: Any) -> bool:
    """Set what the steps lead to, if they lead into a list; a RecipeError if it has no such item."""
    for at in range(1, len(steps)):
        if not steps[at].lstrip("-").isdigit():
            continue
        items = _list_at(layers, steps[:at])
        if items is not None:
            _put(items, steps, at, value)
            layers.origins[".".join(steps)] = OVERRIDE
            return True
    return False


def _list_at(layers: Layers, path: Sequence[str]) -> list[Any] | None:
    """The list at a path; one that is not set is written out as its default."""
    data: Any = layers.data
    for number, step in enumerate(path):
        if not isinstance(data, dict):
            return None
        if step not in data:
            default = _default(path)
            if default is None:
                return None
            for missing in path[number:-1]:
                data = data.setdefault(missing, {})
            data[path[-1]] = default
            layers.origins[".".join(path)] = DEFAULT
            return default
        data = data[step]
    return data if isinstance(data, list) else None


def _default(path: Sequence[str]) -> list[Any] | None:
    info = find_key(path).info
    default = None if info is None else info.get_default(call_default_factory=True, validated_data={})
    if not isinstance(default, list | tuple):
        return None
    return [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in default]


def _put(items: list[Any], steps: Sequence[str], at: int, value: Any) -> None:
    number, rest = int(steps[at]), steps[at + 1 :]
    if not 0 <= number < len(items):
        path, last = ".".join(steps[:at]), len(items) - 1
        expected = f"one of the items 0 to {last} of {path}"
        if last < 1:
            expected = (
                f"item 0, the only one of {path}" if items else f"a list with items, and {path} is empty"
            )
        advice = f"to add one, give the whole list: --set '{path}=[…]'"
        raise RecipeError(f"--set {'.'.join(steps)}", f"item {number}", expected, advice)
    if not rest:
        items[number] = value
        return
    if not isinstance(items[number], dict):  # a tool by its name is short for {use: name}
        items[number] = {"use": items[number]}
    holder = items[number]
    for step in rest[:-1]:
        holder = holder.setdefault(step, {})
    holder[rest[-1]] = value
