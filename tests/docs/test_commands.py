"""Every `practicum` line in the docs and in `--help` runs, after `practicum init`, with few steps."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from practicum.cli import app
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.shipped import copy_recipe, list_recipes

from .pages import PAGES, ROOT, Command, blocks_of, commands_of
from .test_blocks import help_commands

TRAINING = ("train", "eval")
NEEDS_A_RUN = (*TRAINING, "export", "merge", "serve", "view", "diff", "replay")
FEW = {
    "train": "train.steps=3 train.warmup_steps=0 train.prompts=4 rollout.samples=2 rollout.max_new_tokens=6 "
    "eval.rows=4 runtime.threads=1 refills=0 train.minibatch_size=null",
    "eval": "eval.rows=4 runtime.threads=1",
}
"""What makes a run short; the learning is not what these tests are about."""
SOURCES: dict[str, list[Command]] = {
    "help": help_commands(),
    **{str(page.relative_to(ROOT)): commands_of(page) for page in PAGES},
}
"""Commands of each page in their order. `practicum demo` has its own tests: it takes no --set."""


def run(command: Command) -> None:
    """Run it in this process; its exit code and its output are what the page says."""
    words = command.words
    target: str | None = None
    if words[:2] == ["-m", "pytest"]:
        return names_a_test(words[2])
    if command.line.startswith("python "):
        return subprocess.run([sys.executable, *words], check=True) and None
    if words[0] == "serve":
        return serve(command, "serving ", ["--threads", "1"])
    if words[0] == "view":
        return serve(command, "", [])
    if ">" in words:
        words, target = words[: words.index(">")], words[words.index(">") + 1]
    result = CliRunner().invoke(app, [*words, *([] if command.full else few(words))])
    failed = result.exception if not isinstance(result.exception, SystemExit) else None
    assert failed is None, f"{command}\n{failed!r}"
    assert result.exit_code == command.exit_code, f"{command}\n{result.output}"
    if target is not None:
        Path(target).write_text(result.output)
    if command.output is not None:
        assert result.output == command.output, f"{command} prints something else"
    return None


def names_a_test(node: str) -> None:
    """Assert that the test exists: the suite runs it."""
    path, name = node.split("::")
    assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{node} does not exist"


def serve(command: Command, said: str, more: list[str]) -> None:
    """Start the server on any free port, until it says that it serves."""
    words = [*command.words, "--port", "0", *more]  # the last one counts
    server = subprocess.Popen([sys.executable, "-m", "practicum", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith(said), command
        assert "http://" in line, command
    finally:
        server.terminate()
        try:
            server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 0, command


def few(words: list[str]) -> list[str]:
    """Further arguments that shorten this command."""
    small = FEW.get(words[0], "").split()
    if words[0] == "train":
        recipes = [load_recipe(word).recipe for word in words if word.endswith(".yaml")]
        small += ["critic.warmup_steps=0"] if all(recipe.critic for recipe in recipes) else []
    return [word for pair in small for word in ("--set", pair)]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipes as `practicum init` copies them."""
    recipes = tmp_path_factory.mktemp("init") / "recipes"
    for folder in list_recipes():
        copy_recipe(folder, recipes / folder)
    return recipes


@pytest.fixture
def workplace(recipes: Path, empty_folder: Path) -> Path:
    """A folder with these recipes and with the examples."""
    shutil.copytree(recipes, empty_folder / "recipes")
    shutil.copytree(ROOT / "examples", empty_folder / "examples")
    return empty_folder


def sources(trains: bool) -> list[str]:
    """The pages that have commands, those that train or those that only look."""
    return [
        source
        for source, commands in SOURCES.items()
        if commands and trains == any(command.words[0] in NEEDS_A_RUN for command in commands)
    ]


def write_files(source: str) -> None:
    """Write the files that the page shows as the reader's. A tutorial begins in an empty folder."""
    if source.startswith(("docs/tutorials", "docs/prove.md")):
        shutil.rmtree("recipes")
    for block in blocks_of(ROOT / source) if source != "help" else []:
        if block.file:
            Path(block.file).write_text(block.text)


@pytest.mark.parametrize("source", sources(trains=False))
def test_commands_of_pages_that_train_nothing_run(source: str, workplace: Path):
    write_files(source)
    for command in SOURCES[source]:
        run(command)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("source", sources(trains=True))
def test_commands_of_pages_that_train_run(source: str, workplace: Path):
    write_files(source)
    for command in SOURCES[source]:
        if command.words[0] != "demo":
            run(command)


def test_commands_are_found():
    assert {*sources(trains=False)} >= {"README.md", "docs/recipes.md", "docs/dataplane.md", "docs/tasks.md"}
    assert {*sources(trains=True)} >= {"help", "docs/runs.md", "docs/sessions.md", "recipes/sort/README.md"}


def test_recipes_of_a_checkout_are_those_that_init_copies(workplace: Path):
    folders = [folder for folder in (ROOT / "recipes").iterdir() if [*folder.glob("*.yaml")]]
    shipped = [path.relative_to(ROOT) for folder in folders for path in folder.rglob("*.*") if path.is_file()]
    assert not [path for path in shipped if "__pycache__" not in path.parts and not path.is_file()]
