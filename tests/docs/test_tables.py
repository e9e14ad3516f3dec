"""Tables and lists of the docs are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from practicum.algorithms.advantages.registry import ADVANTAGES
from practicum.algorithms.aggregation import AGGREGATIONS
from practicum.algorithms.kl import KL_ESTIMATORS
from practicum.algorithms.policy_losses.registry import POLICY_LOSSES
from practicum.errors import DataError
from practicum.recipe.schema.recipe import Checks, Task
from practicum.tasks.locations import Location, open_rows
from practicum.tasks.scorers import SCORERS
from practicum.trainer.recipe_changes import MAY_CHANGE

from .pages import ROOT
from .sentences import check_sentences
from .tables import TABLES, sample_fields, update_page

DOCS = ROOT / "docs"


def first_cells(page: str, header: str) -> list[str]:
    """What stands in backticks in the first column of the table whose header begins so."""
    lines = (DOCS / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {header}"))
    cells = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells.append(re.findall(r"`([^`]+)`", line.split("|")[1])[0])
    return cells


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_written_from_the_code(name: str):
    page, _ = TABLES[name]
    text = (DOCS / page).read_text()
    assert text == update_page(text, name), "run: python -m tests.docs.tables"


def test_every_algorithm_is_in_a_table():
    assert sorted(first_cells("algorithms.md", "name | advantage")) == sorted(ADVANTAGES)
    assert sorted(first_cells("algorithms.md", "name | loss")) == sorted([*POLICY_LOSSES, "supervised"])
    assert sorted(first_cells("algorithms.md", "name | sum")) == sorted(AGGREGATIONS)
    text = (DOCS / "algorithms.md").read_text()
    assert all(f"`{name}` = " in text for name in KL_ESTIMATORS)


def test_papers_are_those_of_the_docstrings():
    rows = (DOCS / "algorithms.md").read_text().splitlines()
    for name, function in {**ADVANTAGES, **POLICY_LOSSES}.items():
        module = Path(function.__code__.co_filename).read_text()
        row = next(row for row in rows if row.startswith(f"| `{name}` |"))
        papers = re.findall(r"abs/(\d+\.\d+)", row)
        assert papers or name == "reinforce"
        assert all(paper in module for paper in papers), name


def test_every_check_is_in_the_table_with_its_sentence():
    text = (DOCS / "runs.md").read_text()
    for name, sentence in check_sentences():
        assert sentence is not None
        assert any(
            row.startswith(f"| `{name}` |") and f"| {sentence} |" in row for row in text.splitlines()
        ), f"{name}: {sentence}"
    named = [name for name in Checks.model_fields if not name.endswith(("_max", "_min")) and name != "own"]
    assert sorted(set(first_cells("runs.md", "check | looks"))) == sorted(named)


def test_what_a_resumed_run_may_change_is_listed():
    text = (DOCS / "runs.md").read_text()
    assert all(f"`{key}…`" in text if key.endswith(".") else f"`{key}`" in text for key in MAY_CHANGE)


def test_reward_names_and_sample_fields_are_listed():
    assert first_cells("tasks.md", "`use`")[:-1] == ["checker", *SCORERS]
    text = (DOCS / "tasks.md").read_text()
    assert f"({', '.join(f'`{name}`' for name in sample_fields())})" in text


def test_a_bad_row_is_named_as_the_docs_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    file = Path("data/train.jsonl")
    file.parent.mkdir()
    file.write_text('{"prompt": "ab=", "answer": "ab"}\n{"prompt": "ba=", "anwser": "ab"}\n')
    with pytest.raises(DataError) as raised:
        open_rows("t", Task(), Location((str(file),)), needs_answer=True)
    assert f"```text\n{raised.value}\n```" in (DOCS / "tasks.md").read_text()
