"""Whole runs of mixture-of-experts and vision models, with teachers, critics and several trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from practicum.errors import RecipeErrors
from practicum.models.load_model import load_model, load_tokenizer
from practicum.models.processor import make_processor
from practicum.recipe.schema.recipe import Model
from practicum.trainer.evaluate import evaluate_model
from practicum.trainer.preflight import preflight
from practicum.trainer.run import train_loaded

from ..teachers.tiny_teachers import save_teacher
from .recipes import tiny
from .test_run import metrics_of, weights_of

SMALL = {"hidden": 32, "layers": 2, "heads": 2, "context": 128}
MOE = {"random_init": {"family": "qwen3_moe", "experts": 4, **SMALL}}
EYES = {"random_init": {"family": "qwen2_5_vl", **SMALL}}
PICTURES = {
    "dots": {"kind": "dots", "options": {"pictures": [1, 3], "size": [12, 24]}},
    "colour": {"kind": "colour", "options": {"text_only": 50}},
    "copy": {"kind": "copy", "options": {"length": [1, 2]}},
}
UNEVEN = {"agent": {"loop": "tests.trainer.loops:uneven"}}
CUT = {"train": {"steps": 2, "prompts": 6, "minibatches": 2, "lr": 1e-3}}


def saved(folder: Path, model: dict[str, Any], seed: int) -> str:
    """A model of another seed in a folder, with all that it needs."""
    spec = Model.model_validate(model)
    loaded, tokenizer = load_model(spec, seed), load_tokenizer(spec)
    with torch.no_grad():
        for parameter in loaded.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    loaded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if model is EYES:
        make_processor(tokenizer).image_processor.save_pretrained(folder)
    return str(folder)


def trained(folder: Path, **sections: Any) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    train_loaded(tiny(folder, **(CUT | sections)), folder / "run")
    return metrics_of(folder / "run")[1:]


def test_experts_learn_with_teachers_padding_and_several_trajectories(tmp_path: Path):
    teachers = {"t": {"model": saved(tmp_path / "t", MOE, 9)}}
    distill = {"signal": "top_k", "top_k": 4}
    rows = trained(tmp_path, model=MOE, teachers=teachers, distill=distill, **UNEVEN)
    for row in rows:
        assert row["rollout/trajectories"] > 1
        assert row["teacher/t/tokens"] == row["rollout/tokens"]
        assert row["train/gap_max"] < 1e-4
        assert row["train/router_load_max"] >= 1
        assert 0 <= row["train/router_moved"] <= 1


def test_experts_with_a_critic_and_a_reference_train(tmp_path: Path):
    algorithm = {"advantage": "gae", "lam": 0.9, "kl": {"place": "loss"}}
    rows = trained(tmp_path, model=MOE, algorithm=algorithm, critic={}, **UNEVEN)
    assert all("critic/value_loss" in row and "train/kl" in row for row in rows)


@pytest.mark.parametrize("signal", [pytest.param("sampled", marks=pytest.mark.long), "full"])
def test_a_vision_teacher_gives_the_same_where_it_lives(tmp_path: Path, signal: str):
    folder = saved(tmp_path / "t", EYES, 9)
    divergence = {"divergence": "k2"} if signal == "sampled" else {}
    sections = {"model": EYES, "tasks": PICTURES, "distill": {"signal": signal, **divergence}, **UNEVEN}
    near = trained(tmp_path / "near", teachers={"t": {"model": folder}}, **sections)
    far = trained(tmp_path / "far", teachers={"t": {"model": folder, "placement": "own"}}, **sections)
    for one, other in zip(near, far, strict=True):
        assert one["teacher/t/kl"] == pytest.approx(other["teacher/t/kl"], abs=1e-5)
        assert one["teacher/t/kl"] > 0.01
    mine, theirs = (weights_of(tmp_path / name / "run") for name in ("near", "far"))
    for name, weight in mine.items():
        torch.testing.assert_close(theirs[name], weight, rtol=0, atol=2e-3)


def test_pictures_reach_critic_and_reference_and_all_learn(tmp_path: Path):
    algorithm = {"advantage": "gae", "lam": 0.9, "kl": {"place": "reward"}}
    reward = {"functions": [{"use": "tests.trainer.rewards:even_length"}]}
    sections = {"model": EYES, "tasks": PICTURES, "algorithm": algorithm, "critic": {}, "reward": reward}
    rows = trained(tmp_path, **sections)
    assert all(row["train/gap_max"] < 1e-4 for row in rows)
    specs = Model.model_validate(EYES), Model(path=str(tmp_path / "run" / "export"))
    start, end = (load_model(spec, 3).state_dict() for spec in specs)
    moved = [name for name, weight in start.items() if not torch.equal(weight, end[name])]
    assert any("visual" in name for name in moved)
    assert any("visual" not in name for name in moved)


@pytest.mark.long
def test_what_a_vision_run_exports_can_be_evaluated_and_trained_on(tmp_path: Path):
    trained(tmp_path, model=EYES, tasks=PICTURES)
    export = tmp_path / "run" / "export"
    loaded = tiny(tmp_path, model=EYES, tasks=PICTURES)
    assert "eval/greedy" in evaluate_model(loaded.recipe, export).scores
    rows = trained(tmp_path / "next", model={"path": str(export)}, tasks=PICTURES)
    assert rows[0]["train/gap_max"] < 1e-4


def test_pictures_of_files_are_trained_on(tmp_path: Path):
    for name, colour in (("a", (255, 0, 0)), ("b", (0, 0, 255))):
        Image.new("RGB", (16, 24), colour).save(tmp_path / f"{name}.png")
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "colour=", "images": ["a.png"], "answer": "red"}\n'
        '{"prompt": "colour=", "images": ["b.png"], "answer": "blue"}\n'
        '{"prompt": "both=", "images": ["a.png", "b.png"], "answer": "no"}\n'
        '{"prompt": "none=", "answer": "no"}\n'
    )
    tasks = {"mine": {"file": str(tmp_path / "rows.jsonl"), "chat": True}}
    rows = trained(tmp_path, model=EYES, tasks=tasks, train=CUT["train"] | {"prompts": 4})
    assert all(row["train/gap_max"] < 1e-4 for row in rows)


def test_a_teacher_that_does_not_see_is_refused_before_anything_runs(tmp_path: Path):
    blind = save_teacher(tmp_path / "blind", seed=5)
    sections = {"model": EYES, "tasks": PICTURES, "distill": {}}
    for teacher, said in (
        ({"model": blind}, "a vision model, as the student is"),
        (
            {"model": "m", "url": "http://127.0.0.1:1/v1", "tokenizer": blind},
            "for a student that takes images",
        ),
    ):
        with pytest.raises(RecipeErrors, match=said):
            preflight(tiny(tmp_path, teachers={"t": teacher}, **sections))
