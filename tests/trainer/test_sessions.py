"""Sessions in whole runs: several trajectories, rewards of the loop, failures and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import PracticumError
from practicum.sessions import attempts
from practicum.trainer.run import train_loaded

from .recipes import tiny
from .test_run import metrics_of, same_run

HERE = "tests.trainer.loops"


def trained(folder: Path, loop: str, *overrides: str, **sections: Any) -> list[dict[str, Any]]:
    loaded = tiny(folder, f"agent.loop={HERE}:{loop}", *overrides, **sections)
    train_loaded(loaded, folder / "run")
    return metrics_of(folder / "run")[1:]


def samples_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_sessions_of_unequal_numbers_of_trajectories_are_learnt_from_whole(tmp_path: Path):
    rows = trained(tmp_path, "uneven", "train.minibatches=3")
    for row in rows:
        assert row["rollout/sessions"] == 16
        assert row["rollout/trajectories"] == (1 + 2 + 3 + 1) / 4
        assert row["rollout/turns"] == (1 + 3 + 5 + 1) / 4
        assert row["padding/rows"] == -28 % 3
        assert row["train/tokens"] * 3 == pytest.approx(row["rollout/tokens"])


def test_a_failed_session_is_left_out_and_its_reason_is_reported(tmp_path: Path):
    rows = trained(tmp_path, "some_fail")
    for row in rows:
        assert (row["rollout/sessions"], row["rollout/failed"]) == (16, 8)
        assert row["rollout/tokens"] == row["train/tokens"]
    reason = "raised ValueError: session 1 does not like it"
    assert reason in (tmp_path / "run" / "log.txt").read_text()
    for sample in samples_of(tmp_path):
        assert (reason in (sample["failure"] or "")) == (sample["session"] == 1)
        assert (sample["advantage"] is None) == (sample["session"] % 2 == 1)


def test_a_group_with_a_failed_session_can_be_dropped(tmp_path: Path):
    with pytest.raises(PracticumError, match=r"8 sessions failed, the first: .* raised ValueError"):
        trained(tmp_path, "some_fail", "agent.on_failure=drop_group")
    failed = [sample for sample in samples_of(tmp_path) if sample["failure"]]
    assert [sample["session"] for sample in failed] == [1, 3, 1, 3], "a step that fails leaves its answers"


def test_a_failed_session_can_be_run_again_with_other_randomness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attempts, "RETRIES", 20)
    once = trained(tmp_path, "fails_first")
    again = tmp_path / "again"
    again.mkdir()
    tried = trained(again, "fails_first", "agent.on_failure=retry")
    assert sum(row["rollout/failed"] for row in once) > 0
    assert sum(row["rollout/failed"] for row in tried) == 0
    assert sum(row["rollout/retries"] for row in tried) >= sum(row["rollout/failed"] for row in once)


def test_a_session_that_never_ends_fails_at_its_deadline(tmp_path: Path):
    rows = trained(tmp_path, "one_hangs", "agent.deadline_s=1.5", "train.steps=1", "eval.rows=0")
    assert rows[0]["rollout/failed"] == 4
    assert "was not done after agent.deadline_s = 1.5 s" in (tmp_path / "run" / "log.txt").read_text()


def test_rewards_of_a_loop_stand_in_place_of_the_recipes(tmp_path: Path):
    for loop, mean in (("rewards_each", 0.25 + 1.5), ("rewards_all", 1.5)):
        folder = tmp_path / loop
        folder.mkdir()
        for row in trained(folder, loop, "train.steps=2"):
            assert row["reward/mean"] == pytest.approx(mean)
            assert row["reward/part/loop"] == pytest.approx(mean)
            assert not any(name.startswith("reward/part/checker") for name in row)


@pytest.mark.parametrize("loop", ["uneven", pytest.param("some_fail", marks=pytest.mark.long)])
def test_runs_with_sessions_repeat_and_resume(tmp_path: Path, loop: str):
    options = ("train.minibatches=2", "checkpoint.every=2", "eval.every=2", "refills=4")
    options = (*options, 'reward.functions=[{use: "tests.trainer.rewards:even_length"}]')
    loaded = tiny(tmp_path, f"agent.loop={HERE}:{loop}", *options)
    train_loaded(loaded, tmp_path / "whole")
    half = tiny(tmp_path, f"agent.loop={HERE}:{loop}", *options, "train.steps=2")
    train_loaded(half, tmp_path / "parts")
    train_loaded(loaded, tmp_path / "parts", resume=True)
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_session_with_a_helper_is_judged_on_its_own_last_turn(tmp_path: Path):
    function = 'reward.functions=[{use: "tests.trainer.rewards:answer_length"}]'
    rows = trained(tmp_path, "asks_a_helper", function, "train.steps=2")
    for sample in samples_of(tmp_path):
        helper, own = sample["trajectories"]
        assert helper["prompt"] == "copy"
        assert sample["prompt"] == own["prompt"] != "copy"
        assert sample["response"] == "".join(span["text"] for span in own["spans"])
    assert all(row["reward/mean"] <= 2 for row in rows)


def test_why_sessions_of_an_evaluation_failed_is_in_the_log(tmp_path: Path):
    trained(tmp_path, "some_fail", "train.steps=1", "eval.samples=2")
    reason = "failed in the evaluation (16×): agent loop tests.trainer.loops:some_fail raised ValueError"
    assert (tmp_path / "run" / "log.txt").read_text().count(reason) == 2


def test_without_tools_demonstrations_are_answers(tmp_path: Path):
    options = {"tasks": {"total": {"kind": "total", "options": {"numbers": 2, "digits": 1}}}}
    supervised = {"algorithm": {"loss": "supervised", "advantage": "none"}}
    loaded = tiny(tmp_path, "train.steps=1", **options, **supervised)
    train_loaded(loaded, tmp_path / "run")
    shown = [sample["response"].removesuffix("<eos>") for sample in samples_of(tmp_path)]
    assert shown
    assert all(text.isdecimal() for text in shown), shown
