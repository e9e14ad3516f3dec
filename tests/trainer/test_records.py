"""What a run leaves for people and programs to learn from: answers, evaluations, versions, trackers."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from practicum.cli import app
from practicum.observe.trackers import COLUMNS, TRACKERS, StepDetails
from practicum.rewards.reward_functions import RewardSample
from practicum.trainer.run import train_loaded
from practicum.trainer.run_folder import git_state
from practicum.trainer.samples import choose_prompts

from .recipes import tiny
from .test_run import metrics_of

REWARDS = 'reward.functions=[{use: checker}, {use: "tests.trainer.test_records:letters", weight: 0.5}]'
ANSWER = {"id": "1/0/0", "task": "copy", "prompt": "copy: a", "response": "a|b", "expected": 7, "reward": 1.0}
DETAILS = StepDetails(
    {"samples": [ANSWER | {"parts": {"checker": 1.0}, "advantage": None}, ANSWER | {"expected": "x"}]},
    {"sessions/reward": [0.0, 1.0, 1.0]},
)


def letters(sample: RewardSample) -> float:
    print("a reward function that talks")
    return float(sum(map(ord, sample.response_text)) % 5)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that records two groups per step, resumed once."""
    folder = tmp_path_factory.mktemp("records")
    options = (REWARDS, "track.record=2", "track.to=[tensorboard]", "eval.samples=1")
    train_loaded(tiny(folder, *options, "train.steps=1"), folder / "run")
    train_loaded(tiny(folder, *options, "train.steps=2"), folder / "run", resume=True)
    return folder / "run"


def test_a_step_records_whole_groups_with_all_that_made_their_advantage(run: Path):
    samples = lines_of(run / "samples.jsonl")
    assert len({sample["id"] for sample in samples}) == len(samples) == 2 * 2 * 4
    for step in (1, 2):
        groups: dict[int, list[dict[str, Any]]] = {}
        for sample in samples:
            if sample["step"] == step:
                groups.setdefault(sample["group"], []).append(sample)
        assert sorted(group[0]["task"] for group in groups.values()) == ["compare", "copy"]
        for group in groups.values():
            assert [sample["session"] for sample in group] == [0, 1, 2, 3]
            assert len({(sample["prompt"], sample["expected"]) for sample in group}) == 1
            check_rewards(group)


def check_rewards(group: list[dict[str, Any]]) -> None:
    """Rewards are the weighted sums of their parts, and advantages those of GRPO."""
    rewards = [sample["reward"] for sample in group]
    for sample in group:
        parts = sample["parts"]
        assert sample["reward"] == pytest.approx(parts["checker"] + 0.5 * parts["letters"])
        above = sample["reward"] - fmean(rewards)
        assert (sample["advantage"] > 0, sample["advantage"] < 0) == (above > 1e-6, above < -1e-6)
        assert sample["response_tokens"] == sample["sampled_tokens"] <= 6
        assert sample["finish"] in ("stop", "length")
        assert sample["trajectories"] is None
    assert fmean(sample["advantage"] for sample in group) == pytest.approx(0, abs=1e-5)


def test_every_answer_of_every_evaluation_is_recorded(run: Path):
    answers = lines_of(run / "eval.jsonl")
    scored = [row for row in metrics_of(run) if "eval/greedy" in row]
    assert len({answer["id"] for answer in answers}) == len(answers) == len(scored) * 16 * 2
    for row in scored:
        for greedy, name in ((True, "eval/greedy"), (False, "eval/mean@1")):
            rewards = [a["reward"] for a in answers if (a["step"], a["greedy"]) == (row["step"], greedy)]
            assert fmean(rewards) == pytest.approx(row[name])


def test_tensorboard_shows_answers_and_distributions(run: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert {"sessions/reward", "sessions/response_tokens", "sessions/advantage"} <= set(tags["histograms"])
    assert events.Histograms("sessions/reward")[-1].histogram_value.num == 16
    (text,) = events.Tensors("samples/text_summary")[-1].tensor_proto.string_val
    assert text.decode().count("\n") == 1 + 8
    assert "eval/text_summary" in tags["tensors"]


def test_versions_say_how_and_when_the_run_was_started(run: Path):
    first, second = json.loads((run / "versions.json").read_text())["starts"]
    assert [(start["outcome"], start["last_step"]) for start in (first, second)] == [("done", 1), ("done", 2)]
    assert first["started"] <= first["ended"] <= second["started"] <= second["ended"]
    assert first["command"] == shlex.join(sys.orig_argv)
    assert first["commits"]["recipe"] is None


def test_a_commit_is_reported_with_whether_files_differ_from_it(tmp_path: Path):
    def git(*command: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        whole = ["git", "-C", str(tmp_path), *who, *command]
        subprocess.run(whole, check=True, capture_output=True, timeout=30)

    assert git_state(tmp_path) is None
    git("init")
    assert git_state(tmp_path) is None, "no commit yet"
    (tmp_path / "recipe.yaml").write_text("name: a")
    git("add", ".")
    git("commit", "-m", "a recipe")
    (tmp_path / "installed.py").write_text("")
    state = git_state(tmp_path)
    assert state is not None
    assert (len(state["commit"]), state["changed"]) == (40, False)
    assert git_state(tmp_path, "installed.py") is None
    (tmp_path / "recipe.yaml").write_text("name: b")
    assert git_state(tmp_path, "recipe.yaml") == state | {"changed": True}


@given(
    tasks=st.lists(st.sampled_from("abc"), max_size=9),
    count=st.none() | st.integers(0, 10),
    turn=st.integers(0, 5),
)
def test_chosen_prompts_are_as_many_as_asked_and_of_tasks_in_turn(
    tasks: list[str], count: int | None, turn: int
):
    prompts = sorted(choose_prompts(dict(enumerate(tasks)), count, turn))
    assert len(prompts) == min(len(tasks), 10 if count is None else count)
    shown = {task: sum(tasks[prompt] == task for prompt in prompts) for task in tasks}
    for task, number in shown.items():
        assert number == tasks.count(task) or number >= max(shown.values()) - 1
        assert [p for p in prompts if tasks[p] == task] == [p for p, t in enumerate(tasks) if t == task][
            :number
        ]


def test_eval_prints_json_and_nothing_else(tmp_path: Path):
    recipe = tiny(tmp_path, "eval.rows=2").source
    options = ["--set", "eval.rows=2", "--set", REWARDS, "--answers", str(tmp_path / "answers.jsonl")]
    result = CliRunner().invoke(app, ["eval", str(recipe), "--json", *options], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert found["recipe"] == "tiny"
    assert found["scores"].keys() == {"eval/greedy", "eval/greedy/compare", "eval/greedy/copy"}
    assert "a reward function that talks" in result.stderr
    answers = lines_of(tmp_path / "answers.jsonl")
    assert fmean(answer["reward"] for answer in answers) == pytest.approx(found["scores"]["eval/greedy"])


def test_wandb_gets_metrics_answers_and_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("SILENT", "DISABLE_GIT", "DISABLE_CODE", "X_DISABLE_STATS", "X_DISABLE_META"):
        monkeypatch.setenv(f"WANDB_{name}", "true")
    tracker = TRACKERS["wandb"]("records", {"name": "tiny"}, tmp_path)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.log_details(1, DETAILS)
    tracker.close()
    importlib.import_module("wandb").teardown()  # ends its process, which writes what it holds
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    data = json.loads(table.read_text())
    assert data["columns"] == list(COLUMNS)
    assert [row[COLUMNS.index("expected")] for row in data["data"]] == ["7", "x"]
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"sessions/reward" in record.read_bytes()


def test_trackio_gets_metrics_answers_and_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = importlib.import_module("trackio")
    tracker = TRACKERS["trackio"]("records", {"name": "tiny"}, tmp_path)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.log_details(1, DETAILS)
    tracker.close()
    (found,) = trackio.Api().runs("records")
    assert found.name.startswith("tiny-")
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    stored = str(storage.get_logs("records", found.name))
    assert all(text in stored for text in ("reward/mean", "trackio.histogram", "trackio.table", "copy: a"))
