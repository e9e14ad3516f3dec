"""`practicum replay`: a recorded step is learnt again, bit for bit, or with other values."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from practicum.cli import app
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Ragged
from practicum.errors import PracticumError, RecipeError, RecipeErrors
from practicum.observe.records.read_record import Record
from practicum.observe.records.record_files import RecordPlace
from practicum.observe.records.recorder import Recorder
from practicum.recipe.load_recipe import load_recipe
from practicum.trainer.replay import replay_step, replay_text
from practicum.trainer.run import train_loaded
from tests.teachers.tiny_teachers import save_teacher, teachers_recipe

from .runs import change_column, recorded_run


def test_the_same_recipe_gives_the_same_update_bit_for_bit(whole_run: Path):
    for step in (1, 2):
        result = CliRunner().invoke(
            app, ["replay", str(whole_run), "--step", str(step)], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
        assert f"step {step}, repeated from 16 recorded rows: all recorded columns" in result.output
        assert "and the weights of the checkpoint are equal" in result.output


def test_other_values_show_what_would_have_changed(whole_run: Path):
    found = replay_step(whole_run, 2, ["algorithm.clip_high=0.5", "algorithm.clip_low=0.5"])
    assert found.is_equal
    assert found.changed is not None
    assert found.same.metrics["train/clipped_high"] > found.changed.metrics["train/clipped_high"]
    text = replay_text(found)
    # The first optimizer step is on policy: no clip holds a token, and the gradient is the same one.
    assert "cosine of the gradients of the first optimizer step: 1.000000" in text
    assert "train/clipped_high" in text
    other = replay_step(whole_run, 2, ["algorithm.advantage=rloo", "algorithm.loss=reinforce"])
    assert other.changed is not None
    assert not other.same.gradient.equal(other.changed.gradient)
    assert "note: algorithm.clip_low is reset to its default" in replay_text(other)


def test_a_changed_number_is_found_even_if_the_update_does_not_depend_on_it(whole_run: Path, tmp_path: Path):
    run = shutil.copytree(whole_run, tmp_path / "run")
    key = change_column(run, 2, "rollout", "rollout_logprobs", update=2)
    with pytest.raises(PracticumError, match=f"columns of {key} by rollout were changed"):
        replay_step(run, 2)


def test_other_rewards_give_other_numbers(whole_run: Path, tmp_path: Path):
    run = shutil.copytree(whole_run, tmp_path / "run")
    row = Record(run).rows(2)[0]
    batch = BatchRef("train", (row.key,), (replace(row.tags, recorded=True),))
    rewards = Ragged.from_rows([torch.full((row.tags.response_tokens,), 9.0)])
    Recorder(RecordPlace(run / "record", "local")).add("reward", batch, {"reward_tokens": rewards})
    found = replay_step(run, 2)
    assert not found.is_equal
    assert "numbers differ" in replay_text(found)
    assert found.same.weights_equal is False
    assert any(note.startswith("check advantages") for note in found.notes), "a check that fires is reported"


@pytest.mark.parametrize(
    "signal",
    [pytest.param("sampled", marks=pytest.mark.long), "top_k", pytest.param("full", marks=pytest.mark.long)],
)
def test_what_teachers_taught_is_replayed_by_teacher(tmp_path: Path, signal: str):
    names = ("small", "wide")
    for seed, name in enumerate(names):
        save_teacher(tmp_path / name, seed=seed, hidden=48 if name == "wide" else 32)
    teachers = {name: {"model": str(tmp_path / name)} for name in names}
    route = {"by": "task", "map": {"copy": "small", "compare": "wide"}}
    distill = {"signal": signal, "divergence": "k3" if signal == "sampled" else "reverse_kl"}
    recipe = teachers_recipe(teachers=teachers, route=route, distill=distill, track={"record": "all"})
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | {"train": {"steps": 1, "prompts": 4, "lr": 1e-3}}))
    train_loaded(load_recipe(path), tmp_path / "run", quiet=True)
    found = replay_step(tmp_path / "run", 1, ["distill.weight=0.5"])
    assert found.is_equal, replay_text(found)
    assert found.changed is not None
    assert found.changed.metrics["train/loss"] == pytest.approx(found.same.metrics["train/loss"] / 2)
    assert {f"teacher/{name}/loss_share" for name in names} <= found.same.metrics.keys()


def test_what_cannot_be_replayed_is_a_sentence(whole_run: Path, tmp_path: Path):
    with pytest.raises(PracticumError, match="no recorded update in step 7; steps with one: 1 to 2"):
        replay_step(whole_run, 7)
    with pytest.raises(RecipeError, match=r"--set rollout\.samples"):
        replay_step(whole_run, 2, ["rollout.samples=3"])
    with pytest.raises(RecipeErrors, match=r"algorithm\.loss"):
        replay_step(whole_run, 2, ["algorithm.loss=pop_clip"])
    copy = shutil.copytree(whole_run, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints" / "step-000001")
    with pytest.raises(PracticumError, match=r"needs the checkpoint of step 1, but .* has checkpoints of 2"):
        replay_step(copy, 2)
    some = recorded_run(tmp_path / "some", "track.record=1", "train.steps=1")
    with pytest.raises(PracticumError, match=r"track.record: 1\): a replay needs all"):
        replay_step(some, 1)
