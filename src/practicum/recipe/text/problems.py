"""What pydantic found wrong, as RecipeErrors: path, found, expected, and what was meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from practicum.errors import RecipeError
from practicum.recipe.own_parts import registered_names
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.removed_keys import advice_for_removed
from practicum.recipe.text.origins import Origin
from practicum.recipe.text.type_text import (
    Spot,
    all_keys,
    choices,
    expected_type,
    find_key,
    nearest,
    section_of,
    takes_own,
    unwrap,
)
from practicum.recipe.user_functions import meant

OTHER_NAMES = {
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "batch_size": "train.prompts",
    "train_batch_size": "train.prompts",
    "num_generations": "rollout.samples",
    "group_size": "rollout.samples",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_grad_norm": "train.clip_norm",
    "grad_clip": "train.clip_norm",
    "gradient_accumulation_steps": "train.microbatch_tokens",
    "lr_scheduler_type": "train.schedule",
    "warmup_ratio": "train.warmup_steps",
    "kl_coef": "algorithm.kl.coefficient",
    "clip_ratio": "algorithm.clip_high",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "output_dir": "out",
    "model_name_or_path": "model.path",
}
"""What other trainers call the keys."""
_YES_NO = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def explain(
    error: ValidationError, origins: Mapping[str, Origin], root: type[BaseModel] = Recipe
) -> list[RecipeError]:
    """Every problem that a validation found, of a recipe or of another file whose whole is `root`."""
    located = [(details, find_key(details["loc"], root)) for details in _whole_lists(error)]
    return [_explain(details, spot, origins, root) for details, spot in _one_per_union(located)]


def _whole_lists(error: ValidationError) -> Iterator[Any]:
    """What pydantic found; a list with too few items is one problem of the list, not one of each item."""
    short = set()
    for details in error.errors(include_url=False):
        *path, last = details["loc"] or [""]
        if details["type"] == "missing" and isinstance(last, int):
            if tuple(path) in short:
                continue
            short.add(tuple(path))
            details = details | {"type": "too_short", "loc": tuple(path)}
        yield details


def dotted(path: Sequence[str | int]) -> str:
    """A path for people: reward.functions[0].weight."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or "the file"


def shorten(value: Any, limit: int = 60) -> str:
    """repr of a value, cut to fit on a line; words that YAML knows are written as in YAML."""
    text = {None: "null", True: "true", False: "false"}[value] if _is_word(value) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def with_origin(found: str, path: str, origins: Mapping[str, Origin]) -> str:
    """`found`, with the file and line or --set it came from: its own, or that of the list it is in."""
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    beneath = (o for key, o in origins.items() if key == path or key.startswith(f"{path}."))
    origin = origins.get(path) or next(beneath, None)
    while origin is None and path:
        path = path.rpartition(".")[0]
        origin = origins.get(path)
    return found if origin is None else f"{found} ({origin})"


def unknown_key(path: Sequence[str | int], root: type[BaseModel]) -> tuple[str, str]:
    """For a key that does not exist: what could stand there, and what was probably meant."""
    *parent, last = path
    word, level = str(last), dotted(parent) if parent else ""
    here = section_of(find_key(parent, root).kind)
    valid = list(here.model_fields) if here else []
    prefix = f"{level}." if level else ""
    where = f"a key of {level}" if level else f"a key of the {'recipe' if root is Recipe else 'file'}"
    if word in OTHER_NAMES and root is Recipe:
        return where, f"did you mean {OTHER_NAMES[word]}?"
    if close := nearest(word, valid):
        return where, f"did you mean {prefix}{close}?"
    known = sorted((key for key, _ in all_keys(root)), key=lambda key: key.count("."))
    if elsewhere := [key for key in known if key.rsplit(".", 1)[-1] == word]:
        return where, f"did you mean {' or '.join(elsewhere[:3])}?"
    distant = {key.rsplit(".", 1)[-1]: key for key in reversed(known)}
    if close := nearest(word, distant, cutoff=0.75):
        return where, f"did you mean {distant[close]}?"
    return f"{where}: {', '.join(valid)}", "`practicum schema` lists every key" if root is Recipe else ""


def _one_per_union(found: Sequence[tuple[Any, Spot]]) -> Iterator[tuple[Any, Spot]]:
    """Pydantic tells of each form of a union why it does not fit; what was meant is one of them.

    Problems inside a form are of a value with that form's shape; a value with no form's shape is one problem.
    """
    inside = {spot.union for _, spot in found if spot.union is not None and spot.path != spot.union}
    for details, spot in found:
        if spot.union is None or spot.path != spot.union:
            yield details, spot
        elif spot.union not in inside:
            inside.add(spot.union)
            yield details, spot


def _explain(details: Any, spot: Spot, origins: Mapping[str, Origin], root: type[BaseModel]) -> RecipeError:
    value, info, kind = details["input"], spot.info, spot.kind
    path = dotted(spot.path)
    if details["type"] == "extra_forbidden":
        where, meant = unknown_key(spot.path, root)
        if root is Recipe and (advice := advice_for_removed(spot.path)):
            return RecipeError(path, with_origin("a removed key", path, origins), "no such key", advice)
        return RecipeError(path, with_origin("an unknown key", path, origins), where, meant)
    expected = expected_type(kind, info.metadata if info else ())
    if details["type"] == "missing":
        sentence = (info.description or "").rstrip(".") if info else ""
        return RecipeError(path, "nothing", f"{expected} ({sentence})", f"add the key {path}")
    found = with_origin(shorten(value), path, origins)
    optional = info is None or not info.is_required()
    return RecipeError(path, found, expected, _advice(kind, value, path, optional))


def _advice(kind: Any, value: Any, path: str, optional: bool) -> str:
    inner, _ = unwrap(kind)
    if words := choices(kind):
        if takes_own(kind):
            return meant(str(value), [*words, *registered_names(path)])
        close = nearest(str(value), words)
        return f"did you mean {close}?" if close else ""
    if inner is bool and str(value).lower() in _YES_NO:
        return f"write {_YES_NO[str(value).lower()]}"
    if inner in (int, float) and isinstance(value, str) and _is_number(value):
        hint = "write it with a dot (1.0e-4): YAML 1.1 readers take 1e-4 for text"
        return hint if "e" in value.lower() and "." not in value else "remove the quotes"
    if inner is str and isinstance(value, int | float):
        return "put it in quotes"
    section = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
    if section is not None:
        keys = f"its keys are {', '.join(section.model_fields)}"
        if value is not None:
            return keys
        return f"{f'remove {path}' if optional else 'write {}'} to take the defaults; {keys}"
    if isinstance(value, dict) and get_origin(inner) is list:
        return f"write the whole list: --set '{path}=[…]'"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)
