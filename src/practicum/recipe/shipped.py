"""List and copy the recipes that come with practicum (`practicum recipes`, `practicum init`)."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

import practicum
from practicum.errors import PracticumError
from practicum.recipe.load_recipe import base_files, load_recipe
from practicum.recipe.schema.recipe import Expected


def shipped_recipes() -> Path:
    """Return the recipes' folder, in the installed package or in the repository."""
    package = Path(practicum.__file__).parent
    for folder in (package / "_recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return folder
    raise PracticumError("the recipes that come with practicum are missing: reinstall it")


@dataclass(frozen=True, slots=True)
class Shipped:
    """A shipped recipe: its name for `init`, description and expected score."""

    name: str
    about: str
    expected: Expected | None


def list_recipes() -> dict[str, list[Shipped]]:
    groups = {}
    for folder in sorted(folder for folder in shipped_recipes().iterdir() if _recipes(folder)):
        groups[folder.name] = []
        for file in _recipes(folder):
            comment = takewhile(lambda line: line.startswith("#"), file.read_text("utf-8").splitlines())
            about = " ".join(line.lstrip("# ") for line in comment)
            expected = load_recipe(file).recipe.expected
            groups[folder.name].append(Shipped(f"{folder.name}/{file.stem}", about, expected))
    return groups


def copy_recipe(name: str, folder: Path | None = None) -> list[str]:
    """Copy a folder of recipes, or one recipe with its dependencies, and return messages for the user.

    No file is overwritten. Bases and recipes from other folders that the README's commands use are copied
    into subfolders, and the copied README's commands name the copies.
    """
    source, recipes = _find(name)
    target, root = folder or Path(name), source.parent
    whole = len(recipes) == len(_recipes(source))
    others = [p.relative_to(source) for p in sorted(source.rglob("*")) if p.is_file()]
    ignored = re.compile(r"(.*/)?(__pycache__|runs|\.[^/]*)(/.*)?|[^/]*\.yaml")
    files = {source / p: target / p for p in others if not ignored.fullmatch(str(p))}
    readme = (source / "README.md").read_text("utf-8")
    named = [root / name for name in re.findall(r"recipes/([\w/-]+\.yaml)", readme)] if whole else []
    for recipe in [*recipes, *(file for file in named if not file.is_relative_to(source))]:
        for file in base_files(recipe):
            files[file] = target / file.relative_to(source if file.is_relative_to(source) else root)
    if target.exists() and not target.is_dir():
        raise PracticumError(f"{target} is a file: choose another folder with practicum init NAME DIR")
    if there := sorted(str(copy) for copy in files.values() if os.path.lexists(copy)):
        shown = ", ".join(there[:3]) + (f" and {len(there) - 3} more" if len(there) > 3 else "")
        raise PracticumError(f"{shown} already exists, and init overwrites no files: choose another DIR")
    for file, copy in files.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".yaml":
            text = file.read_text(encoding="utf-8")
            for base in base_files(file)[1:2]:  # `extends` points to the copy
                old, new = os.path.relpath(base, file.parent), os.path.relpath(files[base], copy.parent)
                text = text.replace(f"extends: {old}", f"extends: {new}")
            copy.write_text(text, encoding="utf-8")
        elif file.name == "README.md":
            copy.write_text(_with_copies_named(file, files), encoding="utf-8")
        else:
            shutil.copyfile(file, copy)
    read = [f"read {target / 'README.md'}, then"] if (target / "README.md").is_file() else []
    head = f"{target} has the {'recipes' if whole else 'recipe'} {name}: {len(files)} files"
    return [head, *read, f"practicum check --static {files[recipes[0]]}"]


def _find(name: str) -> tuple[Path, list[Path]]:
    """Return the folder of a name and the recipes in it that the name selects."""
    folder, _, recipe = name.removeprefix("recipes/").strip("/").removesuffix(".yaml").partition("/")
    source = shipped_recipes() / folder
    chosen = [file for file in _recipes(source) if recipe in ("", file.stem)] if folder else []
    if chosen:
        return source, chosen
    groups = list_recipes()
    known = [*groups, *(shipped.name for group in groups.values() for shipped in group)]
    near = get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise PracticumError(f"no recipe is named {name}: {meant}`practicum recipes` lists them all")


def _with_copies_named(readme: Path, files: dict[Path, Path]) -> str:
    """Return the README's text with the names of the copied files."""
    text, root = readme.read_text(encoding="utf-8"), readme.parent.parent
    text = text.replace(f"recipes/{readme.parent.name}/", f"{files[readme].parent}/")
    for file, copy in files.items():
        if not file.is_relative_to(readme.parent):
            text = text.replace(f"recipes/{file.relative_to(root)}", str(copy))
    # Link targets outside of the folder are not copied.
    return re.sub(r"\[[^\]]*\]\(\.\./\.\./([^)#]+)[^)]*\)", r"`\1` of the repository", text)


def _recipes(folder: Path) -> list[Path]:
    """Return the recipes of a folder, with those first that others start from."""
    return sorted(folder.glob("*.yaml"), key=lambda file: (file.stem not in ("start", "base"), file))
