"""The recipes that come with practicum: `practicum recipes` lists them, `practicum init` copies one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import practicum
from practicum.errors import PracticumError
from practicum.recipe.load_recipe import base_files, load_recipe
from practicum.recipe.schema.recipe import Expected

_IGNORED = ("__pycache__", "runs")


def shipped_recipes() -> Path:
    """Their folder: inside the installed package, or in the repository."""
    package = Path(practicum.__file__).parent
    for folder in (package / "_recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return folder
    raise PracticumError("the recipes that come with practicum are missing: reinstall it")


@dataclass(frozen=True, slots=True)
class Shipped:
    """A recipe: its name as `init` takes it, what it shows, and what it should reach."""

    name: str
    about: str
    expected: Expected | None


def list_recipes() -> dict[str, list[Shipped]]:
    """All of them, by folder."""
    root = shipped_recipes()
    return {folder.name: [_describe(file) for file in _recipes(folder)] for folder in _folders(root)}


def copy_recipe(name: str, folder: Path | None = None) -> list[str]:
    """Copy a folder of recipes, or one recipe with what it needs; the sentences to say about it.

    No file is overwritten. What is needed of other folders, bases and recipes that a README's commands train
    first, is copied into folders inside; the copied README's commands name the copies.
    """
    source, recipes = _find(name)
    target = folder or Path(name)
    whole = len(recipes) == len(_recipes(source))
    others = [p for p in sorted(source.rglob("*")) if p.is_file() and p not in _recipes(source)]
    files = {p: target / p.relative_to(source) for p in others if not _is_ignored(p.relative_to(source))}
    named = _named_in_readme(source) if whole else []
    for recipe in [*recipes, *named]:
        for file in base_files(recipe):
            inside = file.is_relative_to(source)
            files[file] = target / file.relative_to(source if inside else source.parent)
    _require_free(target, files.values())
    for file, copy in files.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".yaml":
            copy.write_text(_with_bases_inside(file, copy, files), encoding="utf-8")
        elif file.name == "README.md":
            copy.write_text(_with_copies_named(file, files), encoding="utf-8")
        else:
            shutil.copyfile(file, copy)
    first = files[recipes[0]]
    read = [f"read {target / 'README.md'}, then"] if (target / "README.md").is_file() else []
    what = "recipes" if whole else "recipe"
    return [f"{target} has the {what} {name}: {len(files)} files", *read, f"practicum check --static {first}"]


def _find(name: str) -> tuple[Path, list[Path]]:
    """The folder and the recipes of it that a name means."""
    root = shipped_recipes()
    folder, _, recipe = name.removeprefix("recipes/").strip("/").removesuffix(".yaml").partition("/")
    if (root / folder).is_dir() and folder:
        chosen = [file for file in _recipes(root / folder) if recipe in ("", file.stem)]
        if chosen:
            return root / folder, chosen
    known = [shipped.name for group in list_recipes().values() for shipped in group]
    near = get_close_matches(name, [*(f.name for f in _folders(root)), *known], n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise PracticumError(f"no recipe is named {name}: {meant}`practicum recipes` lists them all")


def _require_free(target: Path, copies: Iterable[Path]) -> None:
    if target.exists() and not target.is_dir():
        raise PracticumError(f"{target} is a file: name another folder, practicum init NAME DIR")
    there = sorted(str(copy) for copy in copies if os.path.lexists(copy))
    if there:
        shown = ", ".join(there[:3]) + (f" and {len(there) - 3} more" if len(there) > 3 else "")
        raise PracticumError(f"{shown}: already there, and no file is overwritten. Choose another DIR")


def _with_bases_inside(file: Path, copy: Path, files: dict[Path, Path]) -> str:
    """The recipe's text, its `extends` as the copies lie."""
    text = file.read_text(encoding="utf-8")
    chain = base_files(file)
    if len(chain) > 1:
        base = chain[1]
        old, new = os.path.relpath(base, file.parent), os.path.relpath(files[base], copy.parent)
        text = text.replace(f"extends: {old}", f"extends: {new}")
    return text


def _named_in_readme(folder: Path) -> list[Path]:
    """Recipes of other folders that the README names."""
    text, root = (folder / "README.md").read_text(encoding="utf-8"), folder.parent
    named = dict.fromkeys(root / name for name in re.findall(r"recipes/([\w/-]+\.yaml)", text))
    return [file for file in named if not file.is_relative_to(folder)]


def _with_copies_named(readme: Path, files: dict[Path, Path]) -> str:
    """The README's text, with each file by the name of its copy."""
    text, root = readme.read_text(encoding="utf-8"), readme.parent.parent
    text = text.replace(f"recipes/{readme.parent.name}/", f"{files[readme].parent}/")
    for file, copy in files.items():
        if not file.is_relative_to(readme.parent):
            text = text.replace(f"recipes/{file.relative_to(root)}", str(copy))
    # What a link leads to outside of the folder is not beside the copy.
    return re.sub(r"\[[^\]]*\]\(\.\./\.\./([^)#]+)[^)]*\)", r"`\1` of the repository", text)


def _folders(root: Path) -> list[Path]:
    return sorted(folder for folder in root.iterdir() if folder.is_dir() and _recipes(folder))


def _recipes(folder: Path) -> list[Path]:
    """The recipes of a folder, those first that others start from."""
    files = sorted(folder.glob("*.yaml"))
    return sorted(files, key=lambda file: file.stem not in ("start", "base"))


def _describe(file: Path) -> Shipped:
    """What a recipe's first comment says, and what it expects."""
    comment = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    recipe = load_recipe(file).recipe
    return Shipped(f"{file.parent.name}/{file.stem}", " ".join(comment), recipe.expected)


def _is_ignored(path: Path) -> bool:
    return any(part in _IGNORED or part.startswith(".") for part in path.parts)
