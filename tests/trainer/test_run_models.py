"""From a run to a model: exports, and run folders and checkpoints wherever a model is named."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from practicum.cli import app
from practicum.trainer.run_folder import RunFolder

from .recipes import tiny
from .test_run import stop_after

EVALUATED = {"eval": {"rows": 8, "every": 1}, "checkpoint": {"keep_last": 1}}


def run_command(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def succeed(*words: str | Path) -> str:
    result = run_command(*words)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.output


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its run, which Ctrl-C stopped after two of three steps."""
    folder = tmp_path_factory.mktemp("models")
    tiny(folder, "train.steps=3", train={"steps": 3, "prompts": 4, "lr": 1e-3}, **EVALUATED)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        result = run_command("train", folder / "recipe.yaml", "--out", folder / "run")
    assert result.exit_code == 130, result.output
    assert f"{folder / 'run'} (use the run folder" in result.output
    begin = result.output.splitlines()[:3]
    assert begin == ["loading torch …", "tiny · starting · step 0/3", "making a model with random weights …"]
    return folder


def test_a_stopped_run_is_evaluated_by_its_folder(stopped: Path):
    output = succeed("eval", stopped / "recipe.yaml", "--model", stopped / "run", "--set", "eval.rows=8")
    assert f"model.path: {stopped / 'run'}, its newest checkpoint, step 2: " in output
    assert f"loading model {stopped / 'run' / 'exports' / 'step-000002'} …" in output
    score = RunFolder(stopped / "run").metrics()[-1]["eval/greedy"]
    assert f"{score:.3f}" in output


def test_a_checkpoint_is_exported_as_the_run_itself_exports_it(stopped: Path, tmp_path: Path):
    recipe, run = stopped / "recipe.yaml", tmp_path / "run"
    succeed("train", recipe, "--out", run)
    output = succeed("export", run, "--step", "3")
    assert output.endswith(f"step-000003 → {run}/exports/step-000003\n")
    one, other = run / "export", run / "exports" / "step-000003"
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
    weights, exported = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert weights.keys() == exported.keys()
    assert all(torch.equal(weights[name], exported[name]) for name in weights)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (one / name).read_text() == (other / name).read_text(), name


def test_the_best_checkpoint_is_kept_by_default_and_exported(stopped: Path, tmp_path: Path):
    rows = RunFolder(stopped / "run").metrics()[1:]
    best = max(rows, key=lambda row: row["eval/greedy"])["step"]
    output = succeed("export", stopped / "run", "--best", "--to", tmp_path / "best")
    assert output.endswith(f"step-{best:06d} → {tmp_path}/best\n")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "best").config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(tmp_path / "best").eos_token == "<eos>"


def test_an_export_that_can_not_be_is_refused_with_what_there_is(stopped: Path, tmp_path: Path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    for words, sentence in [
        (["--step", "7"], "has no checkpoint of step 7, only of "),
        (["--step", "2", "--to", tmp_path / "used"], "is there already"),
        (["--step", "2", "--best"], "either --step or --best"),
    ]:
        result = run_command("export", stopped / "run", *words)
        assert (result.exit_code, sentence in result.output) == (2, True), result.output
    assert "is not a run folder or checkpoint" in run_command("export", tmp_path).output


def test_files_are_readable_as_the_umask_says(tmp_path: Path):
    mask = 0o027
    before = os.umask(mask)
    try:
        tiny(tmp_path, train={"steps": 1, "prompts": 4}, eval={"rows": 4})
        succeed("train", tmp_path / "recipe.yaml", "--out", tmp_path / "run")
        succeed("export", tmp_path / "run", "--to", tmp_path / "exported")
    finally:
        os.umask(before)
    for folder in ("run", "exported"):
        for path in (tmp_path / folder).rglob("*"):
            full = 0o777 if path.is_dir() else 0o666
            assert path.stat().st_mode & 0o777 == full & ~mask, path


def test_runs_and_checkpoints_are_starts_teachers_and_references(stopped: Path, tmp_path: Path):
    run = stopped / "run"
    sections = {
        "model": {"path": str(run)},
        "teachers": {"better": {"model": str(run / "checkpoints" / "best")}},
        "distill": {},
        "algorithm": {"kl": {"place": "loss", "reference": str(run)}},
        "train": {"steps": 1, "prompts": 4},
        "eval": {"rows": 4},
    }
    tiny(tmp_path, **sections)
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "run"
    newest = f"{run}, its newest checkpoint, step 2: {run}/exports/step-000002"
    checked = " ".join(succeed("check", "--all", recipe).split())  # its lines are wrapped
    assert f"model.path: {newest}" in checked
    assert f"algorithm.kl.reference: {newest}" in checked
    assert f"teachers.better.model: {run}/checkpoints/best, checkpoint step-00000" in checked
    assert f"model.path: {run}, its newest checkpoint" in succeed("check", "--static", recipe)
    succeed("plan", recipe)
    succeed("train", recipe, "--out", out)
    assert RunFolder(out).recipe()["model"]["path"] == f"{run}/exports/step-000002"
    succeed("train", stopped / "recipe.yaml", "--out", run, "--resume")  # the source goes on to its end
    succeed("train", recipe, "--out", out, "--resume", "--set", "train.steps=2")
    assert RunFolder(out).recipe()["model"]["path"] == f"{run}/exports/step-000002"
    fresh = succeed("train", recipe, "--out", out, "--fresh")
    assert f"model.path: {run}, its final model: {run}/export" in fresh
    assert json.loads((run / "export" / "practicum.json").read_text())["step"] == 3
