"""Tables and lists of the docs are those of the code."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import pytest

from practicum.algorithms.advantages import ADVANTAGES
from practicum.algorithms.aggregation import AGGREGATIONS
from practicum.algorithms.kl import KL_ESTIMATORS
from practicum.algorithms.losses import POLICY_LOSSES
from practicum.checks.watch import CHECKS
from practicum.observe.metrics import METRICS
from practicum.observe.text import ledger_table
from practicum.recipe.checks.divergences import why_unfit
from practicum.recipe.reward_traits import REWARDS
from practicum.recipe.schema.teacher_sections import Distill, Divergence
from practicum.recipe.text.type_text import all_keys
from practicum.trainer.recipe_changes import MAY_CHANGE

from .figures import IMAGES, figures
from .pages import PAGES, ROOT
from .tables import TABLES, sample_fields, update_page

DOCS = ROOT / "docs"
SUFFIXED = re.compile(r"\b(?!lora_)[a-z][a-z0-9_]*_([A-Z][A-Z1]*)\b")
"""A name with a shape suffix; PEFT calls its two matrices lora_A and lora_B."""
FILE = re.compile(r"\.(py|yaml|yml|jsonl?|md|txt|parquet)$")


def rows_of(page: str, header: str) -> list[list[str]]:
    """The cells of the table whose header begins so."""
    lines = (DOCS / page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {header}"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def words(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_written_from_the_code(name: str):
    page, _ = TABLES[name]
    text = (DOCS / page).read_text()
    assert text == update_page(text, name), "run: python -m tests.docs.tables"


@pytest.mark.parametrize(
    ("page", "header", "names"),
    [
        ("algorithms.md", "name | advantage", ADVANTAGES),
        ("algorithms.md", "name | loss", [*POLICY_LOSSES, "supervised"]),
        ("algorithms.md", "name | sum", AGGREGATIONS),
        ("runs.md", "check | looks", CHECKS),
        ("tasks.md", "`use`", [*REWARDS, "package.module:function"]),
    ],
)
def test_every_name_is_in_its_table(page: str, header: str, names: list[str]):
    assert {words(row[0])[0] for row in rows_of(page, header)} == {*names}


def test_names_that_stand_in_sentences_are_all_there():
    algorithms, runs, tasks = ((DOCS / f"{page}.md").read_text() for page in ("algorithms", "runs", "tasks"))
    assert all(f"`{name}` = " in algorithms for name in KL_ESTIMATORS)
    assert all(f"`{key}…`" in runs if key.endswith(".") else f"`{key}`" in runs for key in MAY_CHANGE)
    assert f"({', '.join(f'`{name}`' for name in sample_fields())})" in tasks


def test_every_divergence_is_in_the_table_with_its_signals():
    shown = {words(row[0])[0]: words(row[1]) for row in rows_of("teachers.md", "divergence")}
    signals = get_args(Distill.model_fields["signal"].annotation)
    fitting = {
        name: [signal for signal in signals if why_unfit(name, signal, "loss") is None]
        for name in get_args(Divergence)
    }
    assert shown == fitting


def test_every_column_and_metric_of_the_ledger_is_in_the_table():
    rows = rows_of("teachers.md", "column")
    assert [row[0] for row in rows] == [str(column.header) for column in ledger_table({}).columns][1:]
    measured = [name.removeprefix("teacher/<teacher>/") for name in METRICS if name.startswith("teacher/")]
    assert sorted(word for row in rows for word in words(row[1])) == sorted(measured)


def test_the_legend_of_shape_suffixes_is_that_of_the_code():
    legend = set(re.findall(r"\| `_([A-Z1])` \|", (ROOT / "CONTRIBUTING.md").read_text()))
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    assert {axis for text in texts for suffix in SUFFIXED.findall(text) for axis in suffix} == legend


@pytest.mark.parametrize("page", sorted((DOCS / "coming-from").glob("*.md")), ids=lambda page: page.stem)
def test_keys_that_others_are_mapped_to_exist(page: Path):
    keys = set(re.findall(r"^\| `([\w.<>\[\]]+)`", (DOCS / "keys.md").read_text(), re.MULTILINE))
    sections = {key.split(".")[0] for key in keys}
    cells = [line.split(" | ")[1] for line in page.read_text().splitlines() if line.count(" | ") > 1]
    named = {word.split(":")[0].replace("NAME", "<name>") for cell in cells for word in words(cell)}
    dotted = {word for word in named if "." in word and word.split(".")[0] in sections}
    assert len(dotted) > 5
    assert not {word for word in dotted if word not in keys and word.replace("[]", "") not in keys}


def test_every_figure_is_drawn_and_shown():
    drawn = figures()
    assert {path.name for path in IMAGES.glob("*.svg")} == drawn.keys(), "run: python -m tests.docs.figures"
    assert all(len(svg) < 300_000 for svg in drawn.values())
    text = "".join(page.read_text() for page in PAGES)
    assert not [path.name for path in IMAGES.iterdir() if f"images/{path.name}" not in text]


def unknown_keys(text: str) -> set[str]:
    """Return the dotted names in backticks that begin as a recipe's section does and are no key."""
    keys = {re.sub(r"<.*?>", "*", key) for key, _ in all_keys()}
    sections, found = {key.partition(".")[0] for key in keys}, set()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`([a-z_]+(?:\.[A-Za-z_<>]+)+)(?=[`:/]|\s)", prose):
        pattern = re.sub(r"\b[A-Z]+\b|<.*?>", "*", name)
        patterns = pattern, f"{pattern}.*"
        known = any(fnmatch(key, p) for key in keys for p in patterns) or any(fnmatch(name, k) for k in keys)
        if name.partition(".")[0] in sections and not known and not FILE.search(name):
            found.add(name)
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name != "coming-from"], ids=lambda p: p.name)
def test_pages_name_keys_that_exist(page: Path):
    assert unknown_keys(page.read_text()) == set()


def test_a_removed_key_is_found():
    assert unknown_keys("set `rollout.slots: 4` or `tasks.NAME.file`, `train.lr`") == {"rollout.slots"}


def test_files_and_classes_for_users_of_verl_exist():
    package = ROOT / "src/practicum"
    for _, names, files, _ in rows_of("coming-from/verl.md", "verl | practicum | file"):
        assert all((package / file).exists() for file in words(files)), files
        code = "".join(
            path.read_text() for file in words(files) for path in [package / file] if path.is_file()
        )
        for name in re.findall(r"`@?([A-Z]\w+)", names):
            assert re.search(rf"^class {name}\b", code, re.MULTILINE), name
