"""Load a recipe from files or a dict, apply --set, check it, and keep the origin of every value."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from practicum.errors import RecipeError, RecipeErrors
from practicum.recipe.checks.combinations import combinations
from practicum.recipe.places import locate
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text import yamlfile
from practicum.recipe.text.origins import DEFAULT, Layers, Origin, leaves, spelled_out
from practicum.recipe.text.problems import explain, removed_keys, shorten, with_origin
from practicum.recipe.text.type_text import nearest

DICT = Path("the dict")
"""Placeholder for the file of a recipe from a dict, whose paths are relative to the working directory."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that passed all checks without torch, with the origin of each leaf."""

    recipe: Recipe
    """All values."""
    origins: dict[str, Origin]
    """Where each value came from, by key."""
    source: Path
    """The recipe's file."""
    places: list[str] = field(default_factory=list)
    """Messages with the locations of the recipe's files, models and functions."""


def load_recipe(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe with its bases, apply `key=value` overrides, and check it. Raise all mistakes at once."""
    source, data = (DICT, recipe) if isinstance(recipe, Mapping) else (Path(recipe), None)
    layers = Layers()
    try:
        for file, document in _chain(source, data):
            own = file == source
            kind = "dict" if file == DICT else "file" if own else "base"
            origin = Origin(kind, "" if own else os.path.relpath(file, source.parent))
            values = {key: value for key, value in document.data.items() if own or key != "extends"}
            layers.add(values, origin, document.lines)
    except RecipeError as error:
        raise RecipeErrors(str(source), [error]) from None
    _override(layers, overrides, str(source))
    places = locate(layers.data, layers.origins, source)
    removed = [with_origin(problem, layers.origins) for problem in removed_keys(layers.data)]
    try:
        checked = Recipe.model_validate(layers.data)
    except ValidationError as error:
        paths = [problem.path for problem in removed]
        others = [p for p in explain(error, layers.origins) if not any(q.startswith(p.path) for q in paths)]
        raise RecipeErrors(str(source), removed + others) from None
    if removed:  # in a mapping whose keys are free
        raise RecipeErrors(str(source), removed)
    origins = {leaf: layers.origins.get(leaf, DEFAULT) for leaf, _ in leaves(checked.model_dump())}
    try:
        problems = combinations(checked)
    except RecipeError as error:  # from a custom part that the checks import for its traits
        problems = [error]
    if problems:
        raise RecipeErrors(str(source), [with_origin(p, layers.origins) for p in problems])
    return LoadedRecipe(checked, origins, source, places)


@contextmanager
def problems_of(loaded: LoadedRecipe) -> Iterator[None]:
    """Add the recipe's file and lines to errors in files and models."""
    try:
        yield
    except RecipeErrors as several:
        origins = {leaf: origin for leaf, origin in loaded.origins.items() if origin.kind != "default"}
        problems = [with_origin(problem, origins) for problem in several.errors]
        raise RecipeErrors(str(loaded.source), problems) from None


def base_files(source: Path) -> list[Path]:
    """Return the recipe's file and the chain of its bases."""
    return [Path(os.path.normpath(file)) for file, _ in _chain(source)[::-1]]


def _chain(source: Path, data: Mapping[str, Any] | None = None) -> list[tuple[Path, yamlfile.Document]]:
    """Return the documents of the recipe and its bases, the deepest base first."""
    chain: list[tuple[Path, yamlfile.Document]] = []
    seen: list[Path] = []
    file, document = source, _read(source, "recipe") if data is None else yamlfile.Document(data)
    while True:
        chain.append((file, document))
        seen.append(file.resolve())
        base = document.data.get("extends")
        if base is None:
            return chain[::-1]
        line = document.lines.get("extends")
        place = f"extends of {file}" if line is None else f"extends (line {line} of {file})"
        try:
            file = file.parent / base
            is_circle = file.resolve() in seen
        except (TypeError, ValueError):  # not a string, or characters that no path has
            raise RecipeError(place, shorten(base), "the path of one recipe file") from None
        if is_circle:
            circle = " → ".join(p.name for p in [*seen, file])
            raise RecipeError(place, f"a cycle: {circle}", "a chain of recipes without a cycle")
        document = _read(file, place)


def _read(file: Path, place: str) -> yamlfile.Document:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RecipeError(place, f"{reason}: {file}", "a recipe file (YAML)", _other_file(file)) from None
    except UnicodeDecodeError as error:
        raise RecipeError(str(file), f"a byte that is not UTF-8 ({error.reason})", "text in UTF-8") from None
    document = yamlfile.parse(text, str(file))
    if not isinstance(document.data, dict):
        found = "an empty file" if document.data is None else shorten(document.data)
        raise RecipeError(str(file), found, "a mapping of keys to values", "start with: name: …")
    return document


def _other_file(path: Path) -> str:
    """Return a suggestion for a folder or a missing file."""
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    there = sorted(file for file in folder.iterdir() if file.suffix in (".yaml", ".yml"))
    if folder != path:
        close = nearest(path.stem, [file.stem for file in there])
        there = [file for file in there if file.stem == close]
    return f"did you mean {' or '.join(map(str, there[:3]))}?" if there else ""


def _override(layers: Layers, overrides: Sequence[str], source: str) -> None:
    """Apply all of --set in order, so that later values override earlier ones."""
    data: dict[str, Any] = {}
    problems: list[RecipeError] = []
    for text in overrides:
        key, equals, written = text.partition("=")
        steps = [step.strip() for step in key.split(".")]
        try:
            if not equals or not all(steps):
                raise RecipeError("--set", shorten(text), "key=value, such as train.lr=1e-5")
            if steps == ["extends"]:
                advice = "use the other recipe, or write extends in the file"
                raise RecipeError("--set extends", shorten(written), "any other key", advice)
            value = yamlfile.parse(written, f"--set {key}").data
        except RecipeError as error:
            problems.append(error)
            continue
        # A mapping that a short form stands for is merged.
        if isinstance(mapping := spelled_out(tuple(steps), value), dict) and not isinstance(value, dict):
            ((last, value),) = mapping.items()
            steps.append(last)
        holder = data
        for step in steps[:-1]:
            if not isinstance(holder.get(step), dict):
                holder[step] = {}
            holder = holder[step]
        holder[steps[-1]] = value
    layers.add(data, Origin("--set"))
    if problems:
        raise RecipeErrors(source, problems)
