"""Every key of a recipe is set in a shipped recipe or shown in the docs, not only in the list of keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from practicum.recipe.text.type_text import all_keys

ROOT = Path(__file__).parents[2]
RECIPES = [*ROOT.glob("recipes/**/*.yaml")]
PAGES = [page for page in ROOT.glob("docs/**/*.md") if page.name != "keys.md"]
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def paths(data: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield f"{prefix}{key}"
            yield from paths(value, f"{prefix}{key}.")
    elif isinstance(data, list):
        for value in data:
            yield from paths(value, prefix.removesuffix(".") + "[].")


def test_every_key_is_set_in_a_recipe_or_shown_in_the_docs():
    written = {path for recipe in RECIPES for path in paths(yaml.safe_load(recipe.read_text()))}
    code = "\n".join(found for page in PAGES for found in CODE.findall(page.read_text()))
    missing = []
    for path, _ in all_keys():
        pattern = re.compile(re.escape(path).replace(re.escape("<name>"), r"[^.\[]+"))
        key = re.escape(path.rpartition(".")[2])
        if not any(map(pattern.fullmatch, written)) and not re.search(
            rf"(?<![\w.-]){key}:|\.{key}\b|`{key}`", code
        ):
            missing.append(path)
    assert not missing
