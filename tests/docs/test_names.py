"""Files that README, docs, recipes and `--help` name are in the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from practicum.cli import app

from .pages import PAGES, ROOT, Command, all_blocks

_NAMED = re.compile(r"(?<![\w/.-])((?:recipes|examples|docs|src|tests|benchmarks)/[\w./*-]+)")


def missing(text: str, folder: Path = ROOT) -> list[str]:
    """The paths below the repository's folders that a text names and that do not exist.

    In the README of a folder of recipes (`folder`), `name.yaml` in backticks is a file beside it.
    """
    named = {path.rstrip("./") for path in _NAMED.findall(text)}
    absent = [path for path in named if not any(ROOT.glob(path))]
    if folder.parent == ROOT / "recipes":
        beside = re.findall(r"`([\w-]+\.(?:yaml|py))`", text)
        absent += [name for name in beside if not (folder / name).is_file()]
    return sorted(absent)


def help_texts() -> dict[str, str]:
    """What `practicum COMMAND --help` prints, by command."""
    # One long line for each paragraph: a path is never broken.
    commands: list[str] = list(getattr(get_command(app), "commands"))  # noqa: B009
    lines = {"COLUMNS": "500", "TERMINAL_WIDTH": "500"}
    return {
        name: CliRunner().invoke(app, [*name.split(), "--help"], env=lines).output for name in ("", *commands)
    }


def help_commands() -> list[Command]:
    """The examples of the help texts, in the order in which they build on each other."""
    return [
        Command(f"practicum {name} --help", line.strip())
        for name, text in help_texts().items()
        for line in text.splitlines()
        if line.strip().startswith("practicum ")
    ]


PLACES = {
    **{str(page.relative_to(ROOT)): page for page in [*PAGES, ROOT / "CONTRIBUTING.md"]},
    **{str(file.relative_to(ROOT)): file for file in sorted((ROOT / "recipes").rglob("*.yaml"))},
}


@pytest.mark.parametrize("place", PLACES)
def test_files_that_a_page_names_exist(place: str):
    page = PLACES[place]
    assert not missing(page.read_text(), page.parent if page.suffix == ".md" else ROOT)


def test_files_that_the_help_names_exist():
    texts = help_texts()
    assert len(texts) > 8
    assert {name: missing(text) for name, text in texts.items() if missing(text)} == {}
    assert any("recipes/sort/start.yaml" in text for text in texts.values())


def test_a_name_that_leads_nowhere_is_noticed():
    sort = ROOT / "recipes/sort"
    assert missing("practicum check recipes/sort.yaml --static") == ["recipes/sort.yaml"]
    assert missing("`recipes/sort/none.yaml`, recipes/sort/grpo.yaml.") == ["recipes/sort/none.yaml"]
    assert missing("| `grpo.yaml` | `none.yaml` |", sort) == ["none.yaml"]


def test_blocks_with_a_title_are_files_of_the_repository():
    titled = [block for block in all_blocks() if block.title]
    assert titled
    for block in titled:
        file = ROOT / (block.title or "")
        assert file.is_file(), f"{block}: there is no {block.title}"
        assert file.read_text() == block.text, f"{block} is not what {block.title} says"


def test_the_readme_shows_the_demos_recipe():
    (block,) = [block for block in all_blocks("yaml") if block.page == ROOT / "README.md"]
    real = yaml.safe_load((ROOT / "recipes/mopd/student.yaml").read_text())
    shown = yaml.safe_load(block.text)
    assert shown == {key: value for key, value in real.items() if key in shown}
    assert real.keys() - shown.keys() <= {"expected", "out", "seed", "eval", "checkpoint", "track", "runtime"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    links = [link for link in re.findall(r"\]\(([^)#]+)", page.read_text()) if not link.startswith("http")]
    assert not [link for link in links if not (page.parent / link).exists()]


def test_every_page_is_linked_from_the_readme_or_the_map():
    linked = set()
    for page in (ROOT / "README.md", ROOT / "docs/architecture.md"):
        links = re.findall(r"\]\(([^)#:]+)", page.read_text())
        linked |= {(page.parent / link).resolve() for link in links}
    assert not [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page not in linked]
