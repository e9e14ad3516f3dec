"""Signs that nothing is learnt: sequences of metrics, and real runs that show them or do not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.teachers.tiny_teachers import save_teacher, teachers_recipe
from tests.trainer.recipes import tiny
from typer.testing import CliRunner

from practicum.checks.learning import MANY, SEVERAL, LearningWatch, Signal
from practicum.cli import app
from practicum.recipe.schema.recipe import Recipe
from practicum.trainer.run import train_loaded

BASE: dict[str, Any] = {"name": "r", "model": {"path": "m"}, "tasks": {"sort": {"kind": "sort"}}}
SUPERVISED = {"algorithm": {"loss": "supervised", "advantage": "none"}}
REMAX = {"algorithm": {"advantage": "remax"}}
PPO = {"algorithm": {"advantage": "gae"}, "critic": {}}
TAUGHT = {"teachers": {"t": {"model": "t"}}, "distill": {}, "reward": {"weight": 0.0, "log_only": True}}
HEALTHY = {
    "groups/zero_variance": 0.25,
    "train/grad_norm": 1.5,
    "rollout/truncated": 0.25,
    "reward/mean": 0.25,
    "reward/std": 0.4,
}


def told(sections: dict[str, Any], rows: Iterable[dict[str, float]]) -> list[tuple[int, str]]:
    """What is said, each with the step after which it is."""
    watch = LearningWatch(Signal.of(Recipe.model_validate(BASE | sections)))
    return [(number, text) for number, row in enumerate(rows, 1) for text in watch.note(row)]


def test_groups_without_a_difference_are_said_once_after_several_steps():
    row = HEALTHY | {"groups/zero_variance": 1.0, "train/grad_norm": 0.0, "reward/mean": 0.0}
    ((step, text),) = told({}, [row] * 20)
    assert step == SEVERAL
    assert "all responses to a prompt had the same reward (mean 0)" in text
    assert "rollout.samples" in text


def test_one_step_with_a_difference_begins_the_count_again():
    flat = HEALTHY | {"groups/zero_variance": 1.0}
    assert not told({}, ([flat] * (SEVERAL - 1) + [HEALTHY]) * 3)


def test_a_task_that_was_learnt_to_the_end_is_no_alarm():
    solved = {
        "groups/zero_variance": 1.0,
        "train/grad_norm": 0.0,
        "rollout/truncated": 0.0,
        "reward/mean": 1.0,
    }
    assert not told({}, [HEALTHY] * 3 + [solved] * 20)
    assert told({}, [HEALTHY] * 3 + [solved | {"reward/mean": 0.0}] * 20), "a collapse is one"


@pytest.mark.parametrize(
    ("sections", "words"),
    [(REMAX, "look at reward.functions"), (TAUGHT, "teachers.<name>.model"), (SUPERVISED, "look at samples")],
    ids=["rewards", "teachers", "supervised"],
)
def test_a_gradient_of_zero_names_what_to_look_at(sections: dict[str, Any], words: str):
    ((step, text),) = told(sections, [HEALTHY | {"train/grad_norm": 0.0}] * 20)
    assert step == SEVERAL
    assert text.startswith(f"the gradient was 0 in the last {SEVERAL} steps")
    assert words in text


def test_a_reward_that_never_changes_is_said_after_many_steps():
    constant = HEALTHY | {"groups/zero_variance": 1.0, "reward/mean": 0.5}
    ((step, text),) = told(PPO, [constant | {"reward/std": 0.0}] * 20)
    assert step == MANY
    assert "every response of the last 10 steps had the reward 0.5" in text
    assert "reward.functions" in text
    assert not told(PPO, [constant] * 20), "rewards that are centred have one mean"


def test_answers_that_are_cut_off_name_the_key():
    ((step, text),) = told(
        {}, [HEALTHY | {"rollout/truncated": 0.75, "reward/mean": i / 9} for i in range(9)]
    )
    assert step == SEVERAL
    assert "75% of the responses of the last 5 steps were truncated at rollout.max_new_tokens = 64" in text
    assert "rollout.stop" in text


def test_answers_that_fill_the_context_name_that_limit():
    full = HEALTHY | {"rollout/truncated": 0.75, "rollout/context_full": 0.7}
    rows = [full | {"reward/mean": i / 9} for i in range(9)]
    ((_, text),) = told({"rollout": {"context": 128}}, rows)
    assert "rollout.context = 128" in text
    assert "max_new_tokens" not in text


def test_evaluations_and_steps_of_the_critic_alone_are_no_steps_here():
    rows = [{"eval/greedy": 0.0}, {"critic/loss": 1.0}, HEALTHY | {"groups/zero_variance": 1.0}] * (
        SEVERAL - 1
    )
    assert not told({}, rows)


@pytest.mark.parametrize("sections", [{}, PPO, REMAX, TAUGHT], ids=["grpo", "ppo", "remax", "taught"])
def test_a_run_that_learns_slowly_is_no_alarm(sections: dict[str, Any]):
    assert not told(sections, [HEALTHY] * 50)


def test_rewards_that_are_only_watched_are_not_waited_for():
    constant = HEALTHY | {"groups/zero_variance": 1.0, "reward/mean": 0.0, "reward/std": 0.0}
    assert not told(TAUGHT, [constant] * 20)


def test_failures_a_fallen_entropy_and_a_teacher_far_from_its_target_are_said():
    failing = HEALTHY | {"rollout/failed": 2.0, "rollout/sessions": 8.0}
    ((step, text),) = told({}, [failing] * 9)
    assert (step, "25% of the sessions" in text) == (SEVERAL, True)
    falling = [HEALTHY | {"train/entropy": 1.0}] * 5 + [HEALTHY | {"train/entropy": 0.01}] * 5
    ((_, text),) = told({}, falling)
    assert "entropy fell from 1 to" in text
    assert not told(TAUGHT, falling)
    shares = {"teacher/t/gradient_share": 0.9, "teacher/t/prompts_share": 0.3}
    ((step, text),) = told(TAUGHT, [HEALTHY | shares] * 9)
    assert (step, "t: 90% of the gradient, target 30%" in text) == (SEVERAL, True)
    assert not told(TAUGHT, [HEALTHY | shares, *[HEALTHY | shares | {"teacher/t/gradient_share": 0.3}] * 9])


HOPELESS = {
    "reward": {"functions": [{"use": "tests.trainer.rewards:nothing"}]},
    "rollout": {"samples": 2, "max_new_tokens": 2, "max_num_seqs": 16},
    "train": {"steps": SEVERAL, "prompts": 4},
    "eval": {"rows": 1},
    "expected": {"metric": "eval/greedy", "at_least": 0.5},
}


def test_a_run_that_learns_nothing_says_so_on_screen_in_the_log_and_at_its_end(tmp_path: Path):
    tiny(tmp_path, **HOPELESS)
    run = tmp_path / "run"
    shown = CliRunner().invoke(app, ["train", str(tmp_path / "recipe.yaml"), "--out", str(run)]).stdout
    signs = (
        "random weights (model.random_init)",
        "all responses to a prompt had the same reward",
        "were truncated at",
    )
    log = (run / "log.txt").read_text()
    for sign in signs:
        assert log.count(sign) == 1
        assert shown.count(sign) == 2, "once when it was seen, once in the summary"
    assert "expected: eval/greedy at least 0.5" in shown
    resumed = train_loaded(tiny(tmp_path, "train.steps=6", **HOPELESS), run, resume=True)
    assert [sum(sign in text for text in resumed.warnings) for sign in signs] == [1, 1, 1]
    assert all((run / "log.txt").read_text().count(sign) == 1 for sign in signs)


def test_runs_that_learn_say_nothing(tmp_path: Path):
    steps = {"steps": SEVERAL + 1, "prompts": 4, "lr": 1e-3}
    taught = teachers_recipe(
        train=steps, teachers={"t": {"model": save_teacher(tmp_path / "t", seed=5)}}, distill={}
    )
    # Answers of random weights have no end to come to: the teacher's length is not what this is about.
    taught["rollout"] |= {"stop": list("abcdefghijklmnopqrstuvwxyz0123456789")}
    for name, sections in {"supervised": SUPERVISED | {"train": steps}, "taught": taught}.items():
        assert not train_loaded(tiny(tmp_path, **sections), tmp_path / name).warnings


def _taught(kl: float, reward: float, step: int) -> dict[str, float]:
    noise = 0.01 if step % 2 else -0.01
    return HEALTHY | {"teacher/t/kl": kl + noise, "teacher/t/reward": reward + noise}


def test_a_teacher_whose_kl_rises_while_its_reward_falls_is_reported_once():
    rows = [_taught(0.2, 0.5, i) for i in range(MANY)] + [_taught(0.4, 0.3, i) for i in range(2 * MANY)]
    ((step, text),) = told(TAUGHT, rows)
    assert step == 2 * MANY, "as soon as two windows are full"
    assert text.startswith("t: KL to this teacher rose")


@pytest.mark.parametrize(("kl", "reward"), [(0.4, 0.5), (0.2, 0.3), (0.1, 0.3), (0.4, 0.7), (0.2, 0.5)])
def test_kl_or_reward_alone_is_no_alarm(kl: float, reward: float):
    rows = [_taught(0.2, 0.5, i) for i in range(MANY)] + [_taught(kl, reward, i) for i in range(2 * MANY)]
    assert not told(TAUGHT, rows)


def test_truncation_and_repetition_that_rise_together_are_reported_once():
    def row(step: int, cut: float, repeated: float) -> dict[str, float]:
        noise = 0.01 * (-1) ** step
        return HEALTHY | {"rollout/truncated": cut + noise, "rollout/repetition": repeated + noise}

    calm = [row(step, 0.1, 0.05) for step in range(MANY)]
    ((step, text),) = told({}, calm + [row(step, 0.4, 0.5) for step in range(MANY + 3)])
    assert MANY < step <= 2 * MANY + 3
    assert "they loop" in text
    for cut, repeated in ((0.4, 0.05), (0.1, 0.5)):
        assert not told({}, calm + [row(step, cut, repeated) for step in range(MANY)])
    rare = [row(step, 0.0, 0.0) for step in range(MANY)] + [row(step, 0.04, 0.04) for step in range(MANY)]
    assert not told({}, rare), "a few truncated responses are normal"
