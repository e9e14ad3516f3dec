"""From files, or a dict, and --set to a checked Recipe, with the origin of every value."""

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
from practicum.recipe.places import Place, locate
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text import yamlfile
from practicum.recipe.text.origins import DEFAULT, OVERRIDE, Layers, Origin, leaves, spelled_out
from practicum.recipe.text.problems import explain, shorten, with_origin
from practicum.recipe.text.type_text import nearest

DICT = Path("the dict")
"""Stands for the file of a recipe that has none; names in it are relative to the working directory."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that passed every check that needs no torch, with the origin of each leaf."""

    recipe: Recipe
    origins: dict[str, Origin]
    source: Path
    places: list[Place] = field(default_factory=list)
    """Where the files, models and functions that it names were found."""


def load_recipe(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe, a file or plain data, and what it extends, lay `key=value` over it, and check it.

    All mistakes come together in one RecipeErrors.
    """
    source, data = (DICT, recipe) if isinstance(recipe, Mapping) else (Path(recipe), None)
    layers = Layers()
    try:
        for file, document in _chain(source, data):
            _add_file(layers, file, document, source)
    except RecipeError as error:
        raise RecipeErrors(str(source), [error]) from None
    _override(layers, overrides, str(source))
    places = locate(layers.data, layers.origins, source)
    try:
        checked = Recipe.model_validate(layers.data)
    except ValidationError as error:
        raise RecipeErrors(str(source), explain(error, layers.origins)) from None
    origins = {leaf: layers.origins.get(leaf, DEFAULT) for leaf, _ in leaves(checked.model_dump())}
    try:
        problems = combinations(checked)
    except RecipeError as error:  # a part of the user's that the checks ask for its traits
        problems = [error]
    if problems:
        raise RecipeErrors(str(source), [_with_origin(p, layers.origins) for p in problems])
    return LoadedRecipe(checked, origins, source, places)


@contextmanager
def problems_of(loaded: LoadedRecipe) -> Iterator[None]:
    """Mistakes that are found later, in files and models, name the recipe's file and lines too."""
    try:
        yield
    except RecipeErrors as several:
        origins = {leaf: origin for leaf, origin in loaded.origins.items() if origin.kind != "default"}
        problems = [_with_origin(problem, origins) for problem in several.errors]
        raise RecipeErrors(str(loaded.source), problems) from None


def base_files(source: Path) -> list[Path]:
    """The recipe's file, what it extends, what that extends, and so on."""
    return [Path(os.path.normpath(file)) for file, _ in _chain(source)[::-1]]


def _chain(source: Path, data: Mapping[str, Any] | None = None) -> list[tuple[Path, yamlfile.Document]]:
    """The recipe's file, or its data, and its bases, the deepest base first."""
    chain: list[tuple[Path, yamlfile.Document]] = []
    seen: list[Path] = []
    file = source
    while True:
        if data is not None and not chain:
            document = yamlfile.Document(data)
        else:
            document = _read(file, extended_by=chain[-1] if chain else None)
        chain.append((file, document))
        seen.append(file.resolve())
        base = document.data.get("extends")
        if base is None:
            return chain[::-1]
        place = _extends(file, document)
        if not isinstance(base, str):
            raise RecipeError(place, shorten(base), "the path of one recipe file")
        file = file.parent / base
        try:
            is_circle = file.resolve() in seen
        except ValueError:  # characters that no path has
            raise RecipeError(place, shorten(base), "the path of one recipe file") from None
        if is_circle:
            circle = " → ".join(p.name for p in [*seen, file])
            raise RecipeError(place, f"a circle: {circle}", "a chain of recipes that ends")


def _read(file: Path, extended_by: tuple[Path, yamlfile.Document] | None) -> yamlfile.Document:
    place = "recipe" if extended_by is None else _extends(*extended_by)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except IsADirectoryError:
        raise RecipeError(place, f"the folder {file}", "a recipe file (YAML)", _file_inside(file)) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RecipeError(place, f"{reason}: {file}", "a recipe file (YAML)", _other_file(file)) from None
    except UnicodeDecodeError as error:
        raise RecipeError(str(file), f"a byte that is not UTF-8 ({error.reason})", "text") from None
    document = yamlfile.parse(text, str(file))
    if not isinstance(document.data, dict):
        found = "an empty file" if document.data is None else shorten(document.data)
        raise RecipeError(str(file), found, "a mapping of keys to values", "start with: name: …")
    return document


def _extends(file: Path, document: yamlfile.Document) -> str:
    line = document.lines.get("extends")
    return f"extends of {file}" if line is None else f"extends (line {line} of {file})"


def _file_inside(folder: Path) -> str:
    there = sorted(file for pattern in ("*.yaml", "*.yml") for file in folder.glob(pattern))
    return f"did you mean {' or '.join(str(file) for file in there[:3])}?" if there else ""


def _other_file(missing: Path) -> str:
    if not missing.parent.is_dir():
        return f"the folder {missing.parent} does not exist"
    there = sorted(p.name for p in missing.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    stems = {Path(name).stem: name for name in there}
    close = nearest(missing.stem, stems)
    return f"did you mean {missing.parent / stems[close]}?" if close else ""


def _add_file(layers: Layers, file: Path, document: yamlfile.Document, source: Path) -> None:
    own = file == source
    name = "" if own else os.path.relpath(file, source.parent)

    def origin_of(path: str) -> Origin:
        if file == DICT:
            return Origin("dict")
        lines = document.lines  # a value that was spelled out has the line of its section
        return Origin("file" if own else "base", name, lines.get(path, lines.get(path.rpartition(".")[0])))

    data = {key: value for key, value in document.data.items() if own or key != "extends"}
    layers.add(data, origin_of)


def _override(layers: Layers, overrides: Sequence[str], source: str) -> None:
    """Lay all of --set over what is there; a later one wins over an earlier one."""
    data: dict[str, Any] = {}
    problems: list[RecipeError] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        steps = tuple(step.strip() for step in key.split("."))
        if not equals or not all(steps):
            expected = "key=value, such as train.lr=1e-5"
            problems.append(RecipeError("--set", shorten(text), expected))
        elif steps == ("extends",):
            advice = "give the other recipe, or write extends into the file"
            problems.append(RecipeError("--set extends", shorten(value), "any other key", advice))
        else:
            try:
                parsed = yamlfile.parse(value, f"--set {key}").data
            except RecipeError as error:
                problems.append(error)
                continue
            _place(data, steps, parsed)
    layers.add(data, lambda _: OVERRIDE)
    if problems:
        raise RecipeErrors(source, problems)


def _place(data: dict[str, Any], steps: Sequence[str], value: Any) -> dict[str, Any]:
    """`data` with the value where the steps lead; a mapping that it is short for adds to what is there."""
    if isinstance(mapping := spelled_out(tuple(steps), value), dict) and not isinstance(value, dict):
        ((key, value),) = mapping.items()
        steps = [*steps, key]
    holder = data
    for step in steps[:-1]:
        if not isinstance(holder.get(step), dict):
            holder[step] = {}
        holder = holder[step]
    holder[steps[-1]] = value
    return data


def _with_origin(problem: RecipeError, origins: dict[str, Origin]) -> RecipeError:
    found = with_origin(problem.found, problem.path, origins)
    return RecipeError(problem.path, found, problem.expected, problem.suggestion)
