"""The command line as a user meets it: real processes, and no torch where none is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from practicum import __version__
from practicum.cli import app

RECIPE = "name: run\nmodel: {random_init: {}}\ntasks: {sort: {kind: sort}}\n"
HEAVY = ("torch", "transformers", "numpy", "ray", "vllm")

# Runs the command in this interpreter and reports on stderr which heavy modules it brought in.
PROBE = """
import sys
from practicum.cli import app
try:
    app(sys.argv[1:])
finally:
    print("HEAVY", [m for m in {heavy} if m in sys.modules], file=sys.stderr)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RECIPE)
    return str(path)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "practicum", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "args",
    [
        ["check", "RECIPE", "--static", "--set", "train.lr=1e-5"],
        ["check", "RECIPE", "--static", "--set", "train.lrr=1e-5"],
        ["explain", "RECIPE"],
        ["schema"],
        ["schema", "--json"],
        ["--help"],
        ["train", "--help"],
        ["train", "RECIPE", "--set", "train.lrr=1e-5"],
    ],
)
def test_static_commands_import_no_torch(recipe: str, args: list[str]) -> None:
    args = [recipe if arg == "RECIPE" else arg for arg in args]
    code = PROBE.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if "train.lrr=1e-5" in args else 0), done.stderr
    assert done.stderr.splitlines()[-1] == "HEAVY []"


@pytest.mark.slow
def test_importing_a_trainer_starts_no_full_garbage_collection() -> None:
    code = """
import gc
from practicum import cli

full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
cli.app = lambda **options: __import__("practicum.trainer.run")
cli.main()
print(len(full))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


@pytest.mark.parametrize(("option", "shown"), [("--help", "demo"), ("--version", __version__)])
def test_help_and_version_import_no_recipes(option: str, shown: str) -> None:
    code = PROBE.format(heavy=(*HEAVY, "pydantic", "yaml", "rich", "practicum.recipe", "typer"))
    done = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, timeout=60)
    assert shown in done.stdout
    assert done.stderr.splitlines()[-1] == "HEAVY ['typer']"


def test_check_shows_what_differs_sizes_and_ok(recipe: str) -> None:
    done = run("check", recipe, "--static", "--set", "train.lr=1e-5", "--set", "rollout.samples=4")
    assert done.returncode == 0
    assert done.stderr == ""
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in (
        "key value default",
        "train.lr 1.0e-05 0.0001",
        "rollout.samples 4 8",
        "tasks.sort {kind: sort}",
        "32 prompts × 4 samples = 128 sessions per step",
        "stages: rollout → reward → advantages → update_student → sync → clear",
    ):
        assert line in lines
    assert not any(line.startswith("train.steps") for line in lines)
    assert lines[-1].startswith("ok (static part only)")


def test_check_shows_every_value_and_its_origin_if_asked(recipe: str) -> None:
    result = CliRunner().invoke(app, ["check", recipe, "--static", "--all", "--set", "train.lr=1e-5"])
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    for line in ("name: run # file:1", "lr: 1.0e-05 # --set", "steps: 100 # default"):
        assert line in lines
    assert any(line.startswith("ref_logprobs: nobody reads") for line in lines)


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("recipes/*/*.yaml")), ids=str)
def test_check_is_one_screen_for_every_recipe_that_comes_with_practicum(path: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(path), "--static"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def test_mistakes_are_sentences_on_stderr_and_exit_code_2(recipe: str) -> None:
    done = run("check", recipe, "--static", "--set", "lr=1", "--set", "train.steps=many")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"{recipe}: 2 problems")
    assert "did you mean train.lr" in done.stderr
    assert "Traceback" not in done.stderr
    missing = run("explain", f"{recipe}.none")
    assert (missing.returncode, "no such file" in missing.stderr) == (2, True)


def test_explain_draws_the_plan(recipe: str) -> None:
    result = CliRunner().invoke(app, ["explain", recipe, "--set", "algorithm.kl.place=loss"])
    assert result.exit_code == 0
    assert result.output.startswith("A step of run")
    assert "ref_logprobs   (from ref_logprobs)" in result.output
    assert "not run:" in result.output


def test_schema_is_markdown_or_json() -> None:
    text = CliRunner().invoke(app, ["schema"]).output
    assert text.startswith("# The recipe")
    assert "`train.lr`" in text
    schema = json.loads(CliRunner().invoke(app, ["schema", "--json"]).output)
    assert schema["title"] == "Recipe"


def test_a_bug_is_not_dressed_up_as_a_users_mistake(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("practicum.roles.stage_table.make_plan", broken)
    result = CliRunner().invoke(app, ["explain", recipe])
    assert isinstance(result.exception, ZeroDivisionError)


def test_resume_and_fresh_exclude_each_other(recipe: str) -> None:
    result = CliRunner().invoke(app, ["train", recipe, "--resume", "--fresh"])
    assert result.exit_code == 2
    assert "--fresh" in result.output


@pytest.mark.parametrize("out", ["run.yaml", "run.yaml/runs/mine", "/proc/runs/mine", "x" * 300])
def test_a_run_folder_that_can_not_be_is_refused_before_anything_is_loaded(recipe: str, out: str) -> None:
    folder = Path(recipe).parent
    done = CliRunner().invoke(app, ["train", recipe, "--out", str(folder / out)])
    assert (done.exit_code, "--out DIR" in done.output) == (2, True)
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]
