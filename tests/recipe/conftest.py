"""Recipes written to files of a temporary folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

WriteRecipe = Callable[..., Path]

MINIMAL = """
name: run
model: {random_init: {}}
tasks: {sort: {kind: sort}}
"""


@pytest.fixture
def write(tmp_path: Path) -> WriteRecipe:
    """write(text, name, minimal): a recipe file; `minimal` puts the required keys first."""

    def write_file(text: str = "", name: str = "run.yaml", *, minimal: bool = True) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((MINIMAL if minimal else "") + dedent(text), encoding="utf-8")
        return path

    return write_file
