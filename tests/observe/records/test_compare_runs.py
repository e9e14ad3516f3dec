"""`practicum diff`: what differs between two runs, and where first."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from practicum.cli import app
from practicum.observe.records.compare_runs import compare_runs, comparison_text

from .runs import change_column, recorded_run


def diff(one: Path, two: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["diff", str(one), str(two)], catch_exceptions=False)
    return result.exit_code, result.output


def changed(run: Path, folder: Path, name: str, old: str, new: str) -> Path:
    """A copy of a run with one text replaced in a file, of the same length so that nothing moves."""
    assert len(old) == len(new)
    copy = shutil.copytree(run, folder)
    text = (copy / name).read_text()
    assert old in text
    (copy / name).write_text(text.replace(old, new, 1))
    return copy


def test_the_same_recipe_twice_is_equal(whole_run: Path, tmp_path: Path):
    again = recorded_run(tmp_path)
    code, text = diff(whole_run, again)
    assert code == 0, text
    assert "the recipes are equal" in text
    assert "the numbers are equal: 2 steps and 32 recorded rows" in text


def test_another_value_shows_the_key_and_the_first_number_that_it_moves(whole_run: Path, tmp_path: Path):
    other = recorded_run(tmp_path, "algorithm.clip_high=0.5")
    found = compare_runs(whole_run, other)
    assert found.recipe == {"algorithm.clip_high": (0.02, 0.5)}
    assert found.first is not None
    assert (found.first.step, found.first.field, found.steps) == (1, "weight", 0)
    assert (found.rows, 0 < found.differing <= 16) == (16, True)
    code, text = diff(whole_run, other)
    assert code == 1
    assert "algorithm.clip_high  0.02 → 0.5" in text
    assert "first in step 1," in text
    assert "train/clipped_high" in text


def test_one_number_of_one_token_is_found(whole_run: Path, tmp_path: Path):
    copy = shutil.copytree(whole_run, tmp_path / "copy")
    key = change_column(copy, 2, "advantages", "advantages")
    first = compare_runs(whole_run, copy).first
    assert first is not None
    assert (first.step, first.field, first.key) == (2, "advantages", key)
    assert first.two == pytest.approx(first.one + 1)


def test_a_metric_that_differs_is_found_and_times_are_not_compared(whole_run: Path, tmp_path: Path):
    copy = changed(whole_run, tmp_path / "copy", "metrics.jsonl", '"time/step": ', '"time/stop": ')
    assert compare_runs(whole_run, copy).first is None
    text = (copy / "metrics.jsonl").read_text().splitlines()
    line = json.loads(text[2]) | {"reward/mean": -1.0}
    (copy / "metrics.jsonl").write_text("\n".join([*text[:2], json.dumps(line), ""]))
    first = compare_runs(whole_run, copy).first
    assert first is not None
    assert (first.step, first.field, first.two, first.key) == (2, "reward/mean", -1.0, None)


def test_a_metric_that_repeats_a_key_is_no_difference(whole_run: Path, tmp_path: Path):
    copy = changed(whole_run, tmp_path / "copy", "recipe.yaml", "lr: 0.02", "lr: 0.03")
    (copy / "metrics.jsonl").write_text(
        (copy / "metrics.jsonl").read_text().replace('train/lr": 0.02', 'train/lr": 0.03')
    )
    found = compare_runs(whole_run, copy)
    assert (found.first, found.explained) == (None, ["train/lr"])


def test_last_scores_are_side_by_side_with_the_better_run(whole_run: Path, tmp_path: Path):
    copy = shutil.copytree(whole_run, tmp_path / "copy")
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    more = {"reward/mean": last["reward/mean"] + 1, "train/kl": 0.5}
    (copy / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last | more), ""]))
    found = compare_runs(whole_run, copy)
    assert found.scores["reward/mean"] == (last["reward/mean"], last["reward/mean"] + 1)
    assert found.scores["train/kl"] == (None, 0.5)
    row = next(line for line in comparison_text(found).splitlines() if line.startswith("reward/mean"))
    assert row.endswith(str(copy))


def test_a_run_that_ends_earlier_by_its_recipe_is_equal_as_far_as_it_goes(whole_run: Path, one_step: Path):
    found = compare_runs(whole_run, one_step)
    assert (found.first, found.steps, found.rows) == (None, 1, 16)
    assert found.explained
    assert list(found.recipe) == ["train.steps"]


def test_a_run_that_has_fewer_steps_differs_there(whole_run: Path, one_step: Path, tmp_path: Path):
    one_step = shutil.copytree(one_step, tmp_path / "copy")
    shutil.copy(whole_run / "recipe.yaml", one_step / "recipe.yaml")
    found = compare_runs(whole_run, one_step)
    assert found.first is not None
    assert (found.first.step, found.first.field) == (2, "step")
    assert "16 recorded rows are in" in comparison_text(found)


def test_a_killed_run_and_one_without_a_record_are_compared_as_far_as_they_go(
    whole_run: Path, tmp_path: Path
):
    copy = shutil.copytree(whole_run, tmp_path / "copy")
    shutil.rmtree(copy / "record")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    found = compare_runs(whole_run, copy)
    assert found.first is None
    assert "only metrics are compared" in comparison_text(found)


def test_what_is_no_run_is_a_sentence(whole_run: Path, tmp_path: Path):
    code, text = diff(whole_run, tmp_path)
    assert code == 2
    assert "not the folder of a run" in text
    broken = shutil.copytree(whole_run, tmp_path / "broken")
    (broken / "recipe.yaml").write_text("[")
    assert diff(broken, whole_run) == (
        2,
        f"{broken}/recipe.yaml can't be read: the run has no recipe to compare\n",
    )


def test_reading_and_comparing_import_no_torch():
    code = "import sys, practicum.observe.records.compare_runs as c; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
