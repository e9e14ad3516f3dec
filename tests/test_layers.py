"""Imports point downwards only, and each folder has a docstring."""

import ast
from pathlib import Path

import pytest

import practicum

ROOT = Path(practicum.__file__).parent
RANK = {
    "errors": -1,
    "compat": 0,
    "devices": 0,
    "user_code": 0,
    "concurrency": 1,
    "recipe": 1,
    "dataplane": 2,
    "algorithms": 2,
    "cpu": 2,
    "processes": 2,
    "checks": 3,
    "models": 3,
    "tasks": 4,
    "engines": 4,
    "observe": 4,
    "sessions": 5,
    "learning": 5,
    "rewards": 6,
    "teachers": 6,
    "serving": 7,
    "roles": 7,
    "runtime": 8,
    "forecast": 9,
    "trainer": 10,
    "api": 11,
    "parts": 12,
    "commands": 12,
    "cli": 13,
}
FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.stem in RANK)


def folder_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "practicum" and len(parts) > 1 else None


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            if node.module == "practicum":
                found |= {f"practicum.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for module in imports_of(path):
        other = folder_of(module)
        if other is None or other == own or other == "__version__":
            continue
        assert RANK[other] < RANK[own], f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("folder", sorted(p for p in ROOT.iterdir() if (p / "__init__.py").is_file()))
def test_each_folder_says_what_lives_there(folder: Path):
    tree = ast.parse((folder / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1, f"{folder.name}/__init__.py must import nothing"
