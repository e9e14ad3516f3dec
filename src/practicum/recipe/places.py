"""Locate the files that a recipe names, next to the recipe or in the working directory."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from practicum.recipe.text.origins import Origin
from practicum.recipe.user_functions import module_file, split_function

_FILES = """
    model.path model.tokenizer algorithm.kl.reference
    tasks.*.file tasks.*.file.* tasks.*.eval_file tasks.*.eval_file.* tasks.*.dataset
    teachers.*.model teachers.*.adapter teachers.*.tokenizer reward.models.*.model agent.loop.command.*
    agent.loop.python agent.tools.*.mcp.command.*
"""
"""Keys whose values are files, patterns of files, or folders of models and datasets."""
_FUNCTIONS = """
    reward.functions.*.use tasks.*.rewards.*.use tasks.*.map tasks.*.kind
    agent.loop agent.loop.function agent.tools.* agent.tools.*.use
    algorithm.advantage algorithm.loss algorithm.aggregation algorithm.kl.estimator distill.divergence
    train.schedule train.optimizer checks.own.* track.to.* stages.*
"""
"""Keys whose values may name a function or another custom part as module:name."""


def locate(data: dict[str, Any], origins: Mapping[str, Origin], source: Path) -> list[str]:
    """Replace paths beside the recipe by absolute ones, and return messages with all locations.

    A value is searched in the folder of its recipe file, then in the working directory. Values of --set are
    searched in the opposite order. Files in the working directory, or not yet anywhere, keep their relative
    path.
    """
    sentences = []
    for holder, key, path, is_function in _values(data):
        written = holder[key]
        if not isinstance(written, str) or Path(written).expanduser().is_absolute():
            continue
        if path.endswith(".model") and holder.get("url") is not None:
            continue  # a server's name for its model
        above = path
        while above and above not in origins:  # list items have the list's origin
            above = above.rpartition(".")[0]
        if above not in origins or (is_function and split_function(written) is None):
            continue
        origin, find = origins[above], _function_file if is_function else _file
        beside = Path(
            os.path.normpath((source.parent / origin.file).parent if origin.file else source.parent)
        )
        near, here = find(beside.absolute(), written), find(Path.cwd(), written)
        first, second = (here, near) if origin.kind == "--set" else (near, here)
        taken = first or second
        # A module in neither folder is installed, and a command's argument need not be a file.
        if taken is None and not (is_function or ".command." in path):
            sentences.append(f"{path}: {written} is neither beside the recipe nor in the working directory")
        if taken is None:
            continue
        where = "beside the recipe" if taken is near else "in the working directory"
        also = f" (not taken: {_short(second)})" if second not in (None, taken) else ""
        sentences.append(f"{path}: {_short(taken)}, {where}{also}")
        if taken is near and is_function:
            # The folder lets every process import the same module.
            inside, module, name = split_function(written) or ("", "", "")
            holder[key] = f"{os.path.normpath(beside.absolute() / inside)}/{module}:{name}"
        elif taken is near:
            holder[key] = str(taken)
    return sentences


def absolute_files(data: dict[str, Any]) -> dict[str, Any]:
    """Make relative paths of files in a resolved recipe's data absolute, to compare two of them."""
    for holder, key, _, is_function in _values(data):
        value = holder[key]
        if isinstance(value, str) and not is_function and _file(Path.cwd(), value):
            holder[key] = str(Path(value).absolute())
    return data


def _file(folder: Path, written: str) -> Path | None:
    path = Path(os.path.normpath(folder / written))
    return path if os.path.exists(path) or glob.glob(str(path), recursive=True) else None


def _function_file(folder: Path, written: str) -> Path | None:
    """Return the file of a function's module, ignoring the standard library."""
    inside, module, _ = split_function(written) or ("", "", "")
    if not inside and (module == "__main__" or module.partition(".")[0] in sys.stdlib_module_names):
        return None
    return module_file(Path(os.path.normpath(folder / inside)), module)


def _values(data: Any) -> Iterator[tuple[Any, Any, str, bool]]:
    """Yield (container, key, dotted path, True for a function) of all values that match the patterns."""
    for patterns in (_FILES, _FUNCTIONS):
        for pattern in patterns.split():
            for holder, key, path in _walk(data, pattern.split("."), ""):
                yield holder, key, path, patterns is _FUNCTIONS


def _walk(data: Any, steps: Sequence[str], path: str) -> Iterator[tuple[Any, Any, str]]:
    step, *rest = steps
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in [key for key in keys if step in ("*", key)]:
        if rest:
            yield from _walk(data[key], rest, f"{path}{key}.")
        else:
            yield data, key, f"{path}{key}"


def _short(path: Path) -> str:
    """Return the path relative to the working directory if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
