"""Supervised training on answers that teachers sample and rewards accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from practicum.dataplane.ragged import Columns
from practicum.errors import PracticumError, RecipeErrors
from practicum.recipe.load_recipe import LoadedRecipe, load_recipe
from practicum.roles.rollout import RolloutRole
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import make_plan
from practicum.trainer.run import train_loaded
from tests.teachers.tiny_teachers import save_teacher, teachers_recipe

from .test_run import metrics_of, weights_of

FIELDS = ("prompt_ids", "response_ids", "rollout_logprobs")
REWARD = "def even(sample) -> float:\n    return float(sample.response_tokens % 2 == 0)\n"
TWO = {"by": "task", "map": {"copy": "a", "compare": "b"}}


def write(folder: Path, *overrides: str, **sections: Any) -> LoadedRecipe:
    path = folder / "recipe.yaml"
    (folder / "judging.py").write_text(REWARD)
    supervised = {
        "algorithm": {"loss": "supervised", "advantage": "none"},
        "reward": {"functions": [{"use": "judging:even"}]},
        "teachers": {name: {"model": str(folder / name)} for name in ("a", "b")},
        "route": TWO,
    }
    path.write_text(yaml.safe_dump(teachers_recipe(**supervised | sections)))
    return load_recipe(path, overrides)


@pytest.fixture
def folder(tmp_path: Path, own_parts: None) -> Path:
    for name, seed in (("a", 1), ("b", 2)):
        save_teacher(tmp_path / name, seed=seed, scale=3.0)
    return tmp_path


@pytest.mark.parametrize("placement", ["colocated", pytest.param("own", marks=pytest.mark.long)])
def test_right_answers_of_each_prompts_teacher_are_learnt(
    folder: Path, monkeypatch: pytest.MonkeyPatch, placement: str
):
    learnt: list[Any] = []
    clear = RolloutRole.clear

    def keep(self: RolloutRole, step: StepInfo) -> None:
        batch = step.batch.real()
        columns = Columns("test", self.store.get(batch, FIELDS))
        rows = zip(*(columns.ragged(name).rows for name in FIELDS), strict=True)
        learnt.extend(zip(batch.tags, rows, strict=True))
        clear(self, step)

    monkeypatch.setattr(RolloutRole, "clear", keep)
    placed = f"teachers.b.placement={placement}"
    loaded = write(folder, placed)
    assert [stage.name for stage in make_plan(loaded.recipe)][:3] == ["rollout", "reward", "update_student"]
    train_loaded(loaded, folder / "run")
    models = {name: AutoModelForCausalLM.from_pretrained(folder / name) for name in ("a", "b")}
    for tags, (prompt, response, logprobs) in learnt:
        assert tags.teacher == TWO["map"][tags.task]
        assert tags.response_tokens % 2 == 0
        with torch.no_grad():
            logits = models[tags.teacher](torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        said = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(said, logprobs, atol=1e-4, rtol=1e-4)
    rows = metrics_of(folder / "run")[1:]
    assert {tags.teacher for tags, _ in learnt} == {"a", "b"}
    assert sum(row["answers/accepted"] for row in rows) == len(learnt)
    for row in rows:
        assert row["answers/accepted"] + row["answers/rejected"] == 8
        each = [row.get(f"answers/{what}/{name}", 0) for what in ("accepted", "rejected") for name in "ab"]
        assert sum(each) == 8
    train_loaded(write(folder, placed, "train.steps=1"), folder / "part")
    train_loaded(loaded, folder / "part", resume=True, change=True)
    part = weights_of(folder / "part")
    assert all(torch.equal(x, part[name]) for name, x in weights_of(folder / "run").items())


def test_a_step_without_a_right_answer_stops_the_run(folder: Path):
    loaded = write(folder, reward={"functions": [{"use": "checker"}]})
    with pytest.raises(PracticumError, match="none of the teachers' 8 responses"):
        train_loaded(loaded, folder / "run")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("teachers.a.prompt_prefix=x", r"teachers\.a\.prompt_prefix"),
        ("teachers.b={student: {}}", r"teachers\.b\.student"),
        ("distill={}", "distill"),
        ("runtime.kind=ray", "teachers"),
    ],
)
def test_teachers_that_can_not_answer_are_refused(folder: Path, override: str, key: str):
    with pytest.raises(RecipeErrors, match=key):
        write(folder, override)
