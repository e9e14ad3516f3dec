"""docs/known_bugs.md and the tests of this folder are about the same bugs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from practicum.recipe.schema.recipe import Checks

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs/known_bugs.md").read_text()


def exhibits() -> dict[str, set[str]]:
    """The tests, each with the reports that its docstring names: owner/repository#number."""
    found = {}
    for file in HERE.glob("test_*.py"):
        for node in ast.parse(file.read_text()).body if file != Path(__file__) else ():
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = set(re.findall(r"[\w.-]+/[\w.-]+#\d+", ast.get_docstring(node) or ""))
    return found


def rows() -> list[list[str]]:
    """The cells of the page's tables."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and "`test_" in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_every_test_with_the_reports_it_names():
    named = {
        test.strip("`"): {f"{repository}#{number}" for repository, number in _links(where)}
        for _, where, _, test in rows()
    }
    assert named == exhibits()
    assert len(rows()) == len(named) >= 20
    assert all(named.values())


def test_links_show_the_number_that_they_lead_to():
    for shown, number in re.findall(r"\[[^]]+#(\d+)\]\(https://github.com/[\w./-]+/issues/(\d+)\)", PAGE):
        assert shown == number
    assert len(re.findall(r"\]\(https", PAGE)) == sum(len(_links(row[1])) for row in rows())


def test_checks_that_the_page_names_are_there():
    named = set(re.findall(r"`checks\.(\w+)`", PAGE))
    assert named <= set(Checks.model_fields)


def _links(cell: str) -> list[tuple[str, str]]:
    return re.findall(r"\(https://github\.com/([\w.-]+/[\w.-]+)/issues/(\d+)\)", cell)
