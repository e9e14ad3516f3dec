"""Recipes drawn from the schema: what each key may hold, then mutations of all kinds."""

from __future__ import annotations

import random
import types
import typing
from collections.abc import Callable
from copy import deepcopy
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from practicum.recipe.schema.recipe import Recipe

JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**70, -(2**70), 0.5, 1e-300, 1e300, float("inf"), float("nan"), "", "x",
    "none", "auto", "a:b", "a.b:c", "../..", "\u0000", "\ud800", "é" * 40, "{answer}", "{", "%s", "1", "yes",
    [], {}, [None], [[]], {"": 1}, {"x": {}}, [1, 2], "x" * 5000, {"use": "x"}, "http://127.0.0.1:1/v1", "/",
    ".",
)  # fmt: skip
NAMES: dict[str, tuple[Any, ...]] = {
    "kind": ("copy", "reverse", "sort", "compare", "rotate", "sum", "nosuch", "tests.campaign.parts:agent"),
    "use": (
        "checker",
        "exact",
        "contains",
        "calculator",
        "python",
        "tests.campaign.parts:by_letters",
        "json:loads",
    ),
    "loop": ("single_turn", "tool_use", "retry", "compress", "tests.campaign.parts:agent", "json:loads"),
    "name": ("fuzz", "a b", "x/y", "..", "é"),
    "device": ("auto", "cpu", "cuda:0", "tpu"),
    "dtype": ("float32", "bfloat16", "float64"),
    "domain": ("one", "two"),
    "file": ("rows.jsonl", "nosuch.jsonl", "*.jsonl"),
    "eval_file": ("rows.jsonl", "nosuch.csv"),
    "by": ("domain", "task", "column"),
    "divergence": ("reverse_kl", "forward_kl", "jsd", "k1", "k3", "abs"),
}
"""What a free text may be, by its key."""
_ODDS = 0.2
"""Of a key that need not be set, in a section that is."""


def draw_recipe(rng: random.Random) -> dict[str, Any]:
    """A recipe whose values have the right types, mostly."""
    fields = Recipe.model_fields
    chosen = rng.sample(list(fields), rng.choice([0, 1, 1, 2, 2, 3, 6]))
    recipe = {name: _value(fields[name].annotation, name, fields[name], rng, 0) for name in chosen}
    recipe["name"] = "fuzz"
    recipe["model"] = {"random_init": _tiny_model(rng)} | ({"dtype": "float64"} if rng.random() < 0.1 else {})
    recipe["tasks"] = {
        name: rng.choice([{"kind": "copy", "options": {"length": [1, 2]}}, {"kind": "compare"}, _task(rng)])
        for name in rng.sample(["one", "two", "three"], rng.randint(1, 2))
    }
    for section, size in {
        "rollout": {"max_new_tokens": 8},
        "train": {"prompts": 4},
        "eval": {"rows": 2},
    }.items():
        if isinstance(drawn := recipe.setdefault(section, {}), dict):
            recipe[section] = size | drawn
    for section in ("out", "extends"):
        recipe.pop(section, None)
    return recipe


def _tiny_model(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "context": 128}
    if rng.random() < 0.2:
        made["family"] = rng.choice(["llama", "gpt2", "qwen3_moe"])
    if rng.random() < 0.1:
        made[rng.choice(list(made))] = rng.choice([3, 5, 16, 24])
    return made


def _task(rng: random.Random) -> dict[str, Any]:
    return {"kind": rng.choice(["sort", "reverse", "rotate"]), "weight": rng.choice([0.5, 2.0])} | (
        {"chat": True} if rng.random() < 0.3 else {}
    )


def mutate(recipe: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Change one thing: another value, a wrong key, one that is missing, or two that trade places."""
    places = list(_places(recipe))
    holder, key = rng.choice(places)
    how = rng.randrange(5)
    if how == 0:
        holder[key] = deepcopy(rng.choice(JUNK))
    elif how == 1 and isinstance(holder, dict):
        holder[_misspelt(str(key), rng)] = holder.pop(key)
    elif how == 2 and isinstance(holder, dict):
        del holder[key]
    elif how == 3:
        other, its = rng.choice(places)
        if its in other if isinstance(other, dict) else its < len(other):
            holder[key] = deepcopy(other[its])
    else:
        recipe[rng.choice(list(Recipe.model_fields))] = deepcopy(rng.choice(JUNK))
    return recipe


def _places(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    found = [(value, key) for key in keys]
    return found + [place for key in keys for place in _places(value[key])]


def _misspelt(key: str, rng: random.Random) -> str:
    at = rng.randrange(len(key) + 1)
    return key[:at] + rng.choice(["", "x", "_", "é", "."]) + key[at + rng.randrange(2) :]


def _section(kind: type[BaseModel], rng: random.Random, depth: int) -> dict[str, Any]:
    found = {}
    for name, info in kind.model_fields.items():
        if info.is_required() or rng.random() < _ODDS / depth:
            found[name] = _value(info.annotation, name, info, rng, depth)
    return found


def _value(kind: Any, name: str, info: FieldInfo | None, rng: random.Random, depth: int) -> Any:
    """A value of an annotation."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _value(inner[0], name, info, rng, depth)
    if origin in (Union, types.UnionType):
        return _value(rng.choice(inner), name, info, rng, depth)
    if origin is Literal:
        return rng.choice(inner)
    if origin is list:
        return [_value(inner[0], name, None, rng, depth + 1) for _ in range(rng.randint(0, 2))]
    if origin is tuple:
        return [_value(part, name, None, rng, depth + 1) for part in inner]
    if origin is dict:
        keys = rng.sample(["one", "two", "three", "x"], rng.randint(0, 2))
        return {key: _value(inner[1], name, None, rng, depth + 1) for key in keys}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return _section(kind, rng, depth + 1)
    plain: dict[Any, Callable[[], Any]] = {
        type(None): lambda: None,
        bool: lambda: rng.random() < 0.5,
        int: lambda: _number(info, rng, [0, 1, 2, 3, 4, 8]),
        float: lambda: float(_number(info, rng, [0.0, 0.1, 0.5, 0.9, 1.0, 2.0, 30.0])),
        str: lambda: rng.choice(NAMES.get(name, ("x", "one", "eval/greedy"))),
        Any: lambda: deepcopy(rng.choice(JUNK)),
    }
    return plain[kind]() if kind in plain else deepcopy(rng.choice(JUNK))


def _number(info: FieldInfo | None, rng: random.Random, choices: list[Any]) -> Any:
    """One that the key's bounds allow, mostly."""
    if info is None or rng.random() < 0.03:
        return rng.choice(choices)
    allowed = [c for c in choices if all(_allows(bound, c) for bound in info.metadata)]
    return rng.choice(allowed or choices)


def _allows(bound: Any, value: float) -> bool:
    tests: dict[str, Callable[[Any], bool]] = {
        "ge": lambda b: value >= b,
        "gt": lambda b: value > b,
        "le": lambda b: value <= b,
        "lt": lambda b: value < b,
    }
    return all(test(getattr(bound, name)) for name, test in tests.items() if hasattr(bound, name))
