"""practicum from Python: recipes of dicts, runs in an event loop or a thread, what a run gives back."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

import practicum as pr
from tests.trainer.recipes import TINY

SHORT: dict[str, Any] = TINY | {"eval": {"rows": 4, "every": 1}, "train": TINY["train"] | {"steps": 2}}
HANDLERS = (signal.SIGINT, signal.SIGTERM)


def test_importing_practicum_imports_little_and_loading_a_recipe_no_torch():
    code = (
        "import sys, practicum as pr\n"
        "print([m for m in ('torch', 'pydantic', 'yaml', 'practicum.api') if m in sys.modules])\n"
        "pr.load_recipe({'name': 'a', 'model': {'random_init': {}}, 'tasks': {'sort': {'kind': 'sort'}}})\n"
        "print([m for m in ('torch', 'practicum.api') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "['practicum.api']"], done.stderr


def test_the_page_names_everything():
    text = (Path(__file__).parents[1] / "docs/api.md").read_text()
    attributes = [name for kind in (pr.Run, pr.Report) for name in vars(kind) if not name.startswith("_")]
    names = {*pr.__all__, *attributes} - {"__version__"}
    assert not [name for name in names if not re.search(rf"`(?:pr\.)?{name}\b", text)]


def test_a_dict_is_the_recipe_that_a_file_is(tmp_path: Path):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(SHORT))
    loaded = pr.load_recipe(SHORT)
    assert loaded.recipe == pr.load_recipe(file).recipe
    assert str(loaded.origins["train.steps"]) == "dict"
    base = pr.load_recipe({"extends": str(file), "name": "other"})
    assert (base.recipe.name, base.recipe.train.steps) == ("other", 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"train.lr": 5e-6, "eval": {"rows": 2}, "model.path": Path("models/mine")},
        ["train.lr=5e-6", "eval.rows=2", "model.path=models/mine"],
    ],
)
def test_values_are_set_by_a_dict_or_by_the_words_of_the_command_line(changes: Any):
    loaded = pr.load_recipe(SHORT, set=changes)
    recipe = loaded.recipe
    assert (recipe.train.lr, recipe.eval.rows, recipe.eval.every) == (5e-6, 2, 1)
    assert recipe.model.path == "models/mine"
    assert str(loaded.origins["train.lr"]) == "--set"
    assert pr.load_recipe(SHORT, set="train.lr=5e-6").recipe.train.lr == 5e-6


def test_mistakes_of_a_dict_are_sentences():
    with pytest.raises(pr.PracticumError, match=r"the dict: 2 problems") as raised:
        pr.load_recipe(SHORT | {"trian": {}}, set={"train.lr": "much"})
    assert "did you mean train" in str(raised.value)
    raised.value.add_note("a note")
    shown = raised.value._render_traceback_()
    assert shown == [f"RecipeErrors: {raised.value}", "a note"], "as IPython asks for it"
    with pytest.raises(pr.PracticumError, match=r"set train.lr: found a object, expected numbers"):
        pr.load_recipe(SHORT, set={"train.lr": object()})
    with pytest.raises(pr.PracticumError, match=r"extends of the dict: found no such file"):
        pr.load_recipe({"extends": "none.yaml"})


def test_check_reports_and_raises_what_train_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    static, report = pr.check(SHORT, static=True), pr.check(SHORT)
    assert {*static.sizes} < {*report.sizes}
    assert not static.warnings
    assert any("random weights" in text for text in report.warnings)
    assert any(text.startswith("tokenizer: ") for text in report.findings)
    blocks = [line for line in str(report).splitlines() if line and not line.startswith(" ")]
    assert blocks == ["tiny: the dict", "will run", "warnings", "differs from the defaults", "findings"]
    assert "steps: 2" in report.text(everything=True)
    longer = SHORT | {"rollout": TINY["rollout"] | {"context": 4096}}
    for refused in (pr.check, pr.train):
        with pytest.raises(pr.PracticumError, match=r"rollout.context: found 4096"):
            refused(longer)
    assert not Path("runs/tiny").exists(), "nothing was written"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pr.Run:
    """A run that was started as a notebook starts it: in the main thread, where an event loop runs."""
    rows: list[dict[str, Any]] = []

    async def cell() -> pr.Run:
        return pr.train(SHORT, on_step=rows.append, out=tmp_path_factory.mktemp("api") / "run", quiet=True)

    run = asyncio.run(cell())
    assert rows == run.metrics
    return run


def test_a_run_has_its_metrics_samples_and_models(run: pr.Run):
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    steps, rewards = run.curve("reward/mean")
    assert steps == [1, 2]
    assert rewards == [row["reward/mean"] for row in run.metrics[1:]]
    assert {sample["step"] for sample in run.samples} == {1, 2}
    assert run.model == run.folder / "export"
    assert (run.model / "config.json").is_file()
    assert run.best is not None
    assert run.best.parent == run.folder / "checkpoints"
    assert not run.interrupted
    assert (run.name, run.steps, run.recipe.eval.rows) == ("tiny", 2, 4)
    assert repr(run) == f"<Run tiny: done, 2 steps, {run.folder}>"


def test_evaluations_of_a_run_are_those_that_it_ended_with(run: pr.Run, capsys: pytest.CaptureFixture[str]):
    scores = pr.evaluate(run)
    assert scores["eval/greedy"] == run.last_eval["eval/greedy"]
    assert pr.evaluate(SHORT, model=run.model) == scores
    assert capsys.readouterr().out == ""


def test_ctrl_c_ends_a_run_after_its_step_and_resume_continues_it(
    run: pr.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def stop(row: dict[str, Any]) -> None:
        if row["step"] == 1:
            with pytest.raises(pr.PracticumError, match="this process trains a run already"):
                pr.train(SHORT, out=tmp_path / "other")
            os.kill(os.getpid(), signal.SIGINT)

    before = [signal.getsignal(number) for number in HANDLERS]
    stopped = pr.train(SHORT, on_step=stop, out=tmp_path / "run")
    assert [signal.getsignal(number) for number in HANDLERS] == before
    assert stopped.interrupted
    assert stopped.model == tmp_path / "run" / "exports" / "step-000001"
    shown = capsys.readouterr().out
    assert "making a model with random weights …" in shown
    assert "stopping after this step" in shown
    whole = pr.train(SHORT, out=tmp_path / "run", resume=True, quiet=True)
    assert whole.metrics[-1]["train/loss"] == run.metrics[-1]["train/loss"]


def test_a_run_ends_with_its_export_when_on_step_returns_true(run: pr.Run, tmp_path: Path):
    ended = pr.train(SHORT, on_step=lambda row: row["step"] == 1, out=tmp_path / "run", quiet=True)
    assert (ended.steps, ended.interrupted) == (1, False)
    assert ended.model == tmp_path / "run" / "export"
    assert ended.metrics[1]["train/loss"] == run.metrics[1]["train/loss"]
    assert ended.last_eval == {name: ended.metrics[1][name] for name in ended.last_eval}
    assert not pr.open_run(ended.folder).interrupted


def test_a_run_is_opened_as_it_was_returned(run: pr.Run, tmp_path: Path):
    opened = pr.open_run(run.folder)
    assert (opened.recipe, opened.folder, opened.steps) == (run.recipe, run.folder, run.steps)
    assert opened.warnings == run.warnings
    assert opened.last_eval == {name: run.last_eval[name] for name in opened.last_eval} != {}
    assert opened.first_eval["eval/greedy"] == run.first_eval["eval/greedy"]
    assert pr.evaluate(opened)["eval/greedy"] == run.last_eval["eval/greedy"]
    with pytest.raises(pr.PracticumError):
        pr.open_run(tmp_path)


def test_a_run_s_model_responds_as_in_its_evaluation(run: pr.Run):
    rows = [json.loads(line) for line in (run.folder / "eval.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] == run.steps and row["greedy"] and row["task"] == "copy"][:3]
    responses = pr.sample(run, [row["prompt"] for row in rows], greedy=True)
    assert len(responses) == len(rows) > 0
    for row, response in zip(rows, responses, strict=True):
        assert row["response"].startswith(response)
    assert pr.sample(run.folder, rows[0]["prompt"], greedy=True) == responses[:1]
    with pytest.raises(pr.PracticumError, match="copy, compare"):
        pr.sample(run, "a", task="sort")


def test_dir_lists_the_public_names():
    assert dir(pr) == sorted(pr.__all__)


def test_what_on_step_raises_comes_out_and_the_step_is_kept(run: pr.Run, tmp_path: Path):
    """In a thread, which can set no signal handlers."""
    rows, errors = [], []

    def prune(row: dict[str, Any]) -> None:
        rows.append(row["step"])
        if len(rows) == 2:
            raise LookupError("not worth it")

    def work() -> None:
        try:
            pr.train(SHORT, on_step=prune, out=tmp_path / "run", quiet=True)
        except LookupError as error:
            errors.append(error)
        pr.train(SHORT, on_step=prune, out=tmp_path / "run", resume=True, quiet=True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=120)
    assert "has a checkpoint of step 1" in errors[0].__notes__[-1]
    assert rows == [0, 1, 1, 2]
    metrics = [row["reward/mean"] for row in run.metrics[1:]]
    text = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(text) == 3
    assert [yaml.safe_load(line)["reward/mean"] for line in text[1:]] == metrics


def test_a_script_without_a_main_guard_may_start_processes(tmp_path: Path):
    """The engines of a run with a lag have their own process, which does not run the script again."""
    script = tmp_path / "script.py"
    recipe = SHORT | {"rollout": TINY["rollout"] | {"lag": 1}}
    script.write_text(f"import practicum as pr\nprint('ran')\npr.train({recipe!r}, out='run', quiet=True)\n")
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran") == 1
    assert (tmp_path / "run" / "export").is_dir()
