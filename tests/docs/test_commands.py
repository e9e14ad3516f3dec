"""Every `practicum` line in the docs runs, in a copy of the repository's recipes, with few steps and rows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from practicum.cli import app
from practicum.models.load_model import load_model, load_tokenizer
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import MakeModel, Model

from .pages import PAGES, ROOT, Command, commands_of, write_files

TRAINING = ("train", "eval", "demo")
SERVING = ("serve",)
FEW = {
    "train": "train.steps=2 train.warmup_steps=0 train.prompts=4 rollout.samples=2 rollout.max_new_tokens=6 "
    "eval.rows=4 runtime.threads=1",
    "eval": "eval.rows=4 runtime.threads=1",
}
"""What makes a run short; the learning is not what these tests are about."""


def is_static(command: Command) -> bool:
    return command.words[0] not in TRAINING + SERVING


def run(command: Command) -> str:
    """Run it in this process; its output, after the exit code was as the page says."""
    words = command.words
    target: str | None = None
    if ">" in words:
        words, target = words[: words.index(">")], words[words.index(">") + 1]
    result = CliRunner().invoke(app, [*words, *few(words)])
    failed = result.exception if not isinstance(result.exception, SystemExit) else None
    assert failed is None, f"{command}\n{failed!r}"
    assert result.exit_code == command.exit_code, f"{command}\n{result.output}"
    if target is not None:
        Path(target).write_text(result.output)
    return result.output


def few(words: list[str]) -> list[str]:
    """Further arguments that shorten this command."""
    small = FEW.get(words[0], "").split()
    if words[0] == "train":
        recipes = [load_recipe(word).recipe for word in words if word.endswith(".yaml")]
        small += ["critic.warmup_steps=0"] if all(recipe.critic for recipe in recipes) else []
    return [word for pair in small for word in ("--set", pair)]


@pytest.fixture
def workplace(empty_folder: Path) -> Path:
    """A folder with the repository's recipes and examples, and a tiny model as the demo's base model."""
    for name in ("recipes", "examples"):
        shutil.copytree(ROOT / name, empty_folder / name)
    put_base_model(empty_folder / "runs/mopd/base/export")
    return empty_folder


def put_base_model(folder: Path) -> None:
    make = MakeModel(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, context=128)
    spec = Model(make=make, device="cpu")
    load_model(spec, seed=0).save_pretrained(folder)
    load_tokenizer(spec).save_pretrained(folder)


def run_page(page: Path, folder: Path, commands: list[Command], monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(page, folder)
    for command in commands:
        with monkeypatch.context() as patch:
            if command.finds_modules_here:
                patch.syspath_prepend(os.fspath(folder))
            output = run(command)
        if command.output is not None:
            assert output == command.output, f"{command} prints something else"


def pages_with(static: bool) -> list[Path]:
    kind = (lambda c: is_static(c)) if static else (lambda c: c.words[0] in TRAINING)
    return [page for page in PAGES if any(map(kind, commands_of(page)))]


@pytest.mark.parametrize("page", pages_with(static=True), ids=lambda page: page.stem)
def test_commands_that_only_look_run(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch):
    run_page(page, workplace, [c for c in commands_of(page) if is_static(c)], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(static=False), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_train_run(page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch):
    # The demo has tests of its own: it takes no --set.
    commands = [c for c in commands_of(page) if c.words[0] in TRAINING and c.words[0] != "demo"]
    if any("recipes/mopd/base.yaml" in c.words for c in commands):
        shutil.rmtree(workplace / "runs")  # the page trains the base model itself
    run_page(page, workplace, commands, monkeypatch)


@pytest.mark.slow
def test_commands_that_serve_run(workplace: Path):
    commands = [c for page in PAGES for c in commands_of(page) if c.words[0] in SERVING]
    assert commands
    for command in commands:
        words = [*command.words, "--port", "0", "--threads", "1"]  # the last one counts: any free port
        server = subprocess.Popen(
            [sys.executable, "-m", "practicum.cli", *words], cwd=workplace, stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("serving "), command
        finally:
            server.terminate()
            server.communicate(timeout=60)
        assert server.returncode == 0, command


def test_commands_are_found():
    assert {page.stem for page in pages_with(static=True)} >= {"recipes", "dataplane", "tasks", "algorithms"}
    assert {page.stem for page in pages_with(static=False)} >= {"runs", "sessions"}


def test_a_command_that_does_not_do_what_the_page_says_is_noticed(workplace: Path):
    page = workplace / "page.md"
    page.write_text("```sh\npracticum check recipes/none.yaml --static\n```\n")
    (command,) = commands_of(page)
    with pytest.raises(AssertionError, match="no such file"):
        run(command)
