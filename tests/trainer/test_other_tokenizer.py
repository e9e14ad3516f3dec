"""Whole runs with a teacher that has another tokenizer, and with mixtures."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from practicum.errors import RecipeErrors, TeacherError
from practicum.models.load_model import load_model, make_model
from practicum.recipe.load_recipe import LoadedRecipe, load_recipe
from practicum.recipe.schema.recipe import MakeModel, Model
from practicum.teachers.shared_tokens import Coverage
from practicum.trainer.preflight import check_without_models, preflight
from practicum.trainer.run import train_loaded
from tests.serving.servers import MODEL, served
from tests.teachers.tiny_teachers import MAKE, save_teacher, teachers_recipe

from .test_run import metrics_of, weights_of

SAMPLED = {"divergence": "k1_straight", "signal": "shared"}


def write(folder: Path, **sections: Any) -> LoadedRecipe:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(teachers_recipe(**sections)))
    return load_recipe(path)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A teacher with byte-level tokens, some of which are several characters."""
    folder = tmp_path_factory.mktemp("foreign")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=262, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )  # pyright: ignore[reportCallIssue]
    core.train_from_iterator(["copy: ab ab cd ef=", "12<34 compare"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", bos_token="<s>", pad_token="</s>"
    )
    model = make_model(MakeModel.model_validate(MAKE), tokenizer, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("placement", ["colocated", pytest.param("own", marks=pytest.mark.slow)])
def test_a_student_learns_from_a_teacher_with_another_tokenizer(
    tmp_path: Path, foreign: str, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("practicum.teachers.shared_tokens.LEAST_MASS", 0.0)  # the models have random weights
    teachers = {"far": {"model": foreign, "placement": placement}}
    train = {"steps": 10, "prompts": 4, "lr": 1e-3}
    loaded = write(tmp_path, teachers=teachers, distill={"signal": "shared", "top_k": 8}, train=train)
    found = preflight(loaded).findings
    assert any("another tokenizer" in finding for finding in found)
    assert found[1].split()[0] == "far"
    train_loaded(loaded, tmp_path / placement)
    log = (tmp_path / placement / "log.txt").read_text()
    assert found[1] in log, "the first step shows the same table"
    assert "another tokenizer" in log
    rows = metrics_of(tmp_path / placement)[1:]
    assert all(0 < row["train/teacher_coverage"] <= 1 for row in rows)
    assert all(row["teacher/far/coverage"] == pytest.approx(row["train/teacher_coverage"]) for row in rows)
    assert all(0 < row["train/teacher_mass"] < 1 and 0 < row["train/shared_mass"] < 1 for row in rows)
    assert all(0 <= row["train/numeral_coverage"] <= 1 for row in rows)
    assert all(row["train/grad_norm"] > 0 for row in rows)


def test_a_server_with_another_tokenizer_is_compared_at_the_same_sampled_tokens(
    tmp_path: Path, foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sections: dict[str, Any] = {
        "distill": SAMPLED,
        "train": {"steps": 2, "prompts": 4, "lr": 1e-3, "optimizer": "tests.learning.optimizers:steady"},
    }
    train_loaded(write(tmp_path, teachers={"far": {"model": foreign}}, **sections), tmp_path / "here")
    with served(load_model(Model(path=foreign, device="cpu"), 0)) as server:
        teachers = {"far": {"url": server.url, "model": MODEL, "tokenizer": foreign}}
        loaded = write(tmp_path, teachers=teachers, **sections)
        cells = next(line.split() for line in preflight(loaded).findings if line.split()[0] == "far")
        train_loaded(loaded, tmp_path / "there")
    assert cells[1:5] == ["–"] * 4, "a server knows nothing of the student's tokens"
    assert cells[5].startswith("~")
    assert cells[8] == "shared"
    one, other = weights_of(tmp_path / "here"), weights_of(tmp_path / "there")
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-6)
    covered = [row["train/teacher_coverage"] for row in metrics_of(tmp_path / "here")[1:]]
    assert covered == [row["train/teacher_coverage"] for row in metrics_of(tmp_path / "there")[1:]]
    assert 0 < min(covered) <= max(covered) < 1


def test_a_teacher_that_shares_too_little_is_refused(
    tmp_path: Path, foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("practicum.teachers.teacher_checks.LEAST_SHARED", 1.01)
    loaded = write(tmp_path, teachers={"far": {"model": foreign}}, distill={"signal": "shared"})
    with pytest.raises(RecipeErrors) as caught:
        preflight(loaded)
    assert [problem.path for problem in caught.value.errors] == ["teachers.far.model"]


@pytest.mark.parametrize(("strict", "refused"), [(49, True), (50, False)])
def test_half_of_the_tokens_is_enough(
    tmp_path: Path, foreign: str, monkeypatch: pytest.MonkeyPatch, strict: int, refused: bool
) -> None:
    counted = {"far": Coverage(tokens=100, strict=strict)}
    monkeypatch.setattr("practicum.teachers.teacher_checks.coverages", lambda *_: counted)
    loaded = write(tmp_path, teachers={"far": {"model": foreign}}, distill={"signal": "shared"})
    with pytest.raises(RecipeErrors) if refused else nullcontext():
        check_without_models(loaded.recipe)


def test_a_teacher_whose_mass_lies_elsewhere_is_refused_before_the_weights_change(
    tmp_path: Path, foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = write(tmp_path, teachers={"far": {"model": foreign}}, distill={"signal": "shared", "top_k": 2})
    with pytest.raises(TeacherError, match="far"):
        preflight(loaded)
    with pytest.raises(TeacherError, match="far"):
        train_loaded(loaded, tmp_path / "run")
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0]


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"distill": {"signal": "shared", "divergence": "k1"}}, "distill.divergence"),
        ({"distill": {"signal": "student_top_k"}, "teachers": "url"}, "distill.signal"),
        ({"distill": {"signal": "shared"}, "teachers": "url"}, "distill.signal"),
        ({"distill": {"signal": "top_k"}, "teachers": "mixture"}, "distill.signal"),
        ({"distill": {"signal": "sampled", "divergence": "k2"}, "teachers": "heavy"}, "teachers.a.mixture"),
        (
            {"distill": {"signal": "shared"}, "agent": {"loop": "tool_use", "tools": ["calculator"]}},
            "distill.signal",
        ),
    ],
)
def test_what_can_not_be_compared_is_refused(tmp_path: Path, sections: dict[str, Any], key: str) -> None:
    teachers: dict[str, Any] = {
        "url": {"a": {"url": "http://127.0.0.1:9/v1", "model": "m"}},
        "mixture": {"a": {"model": "x", "mixture": {"a": 0.5, "b": 0.5}}, "b": {"model": "y"}},
        "heavy": {"a": {"model": "x", "mixture": {"a": 0.5, "b": 0.6}}, "b": {"model": "y"}},
    }
    sections["teachers"] = teachers.get(sections.get("teachers", ""), {"a": {"model": "x"}})
    if len(sections["teachers"]) > 1:
        sections["route"] = {"by": "task", "map": {"copy": "a", "compare": "a"}}
    with pytest.raises(RecipeErrors) as caught:
        write(tmp_path, **sections)
    assert key in [problem.path for problem in caught.value.errors]


def test_a_student_learns_from_a_mixture(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        save_teacher(tmp_path / name, seed=seed)
    teachers = {
        "a": {"model": str(tmp_path / "a"), "mixture": {"a": 0.5, "b": 0.5}},
        "b": {"model": str(tmp_path / "b")},
    }
    route = {"by": "task", "map": {"copy": "a", "compare": "a"}}
    loaded = write(tmp_path, teachers=teachers, route=route, distill={"signal": "student_top_k", "top_k": 8})
    train_loaded(loaded, tmp_path / "run")
    rows = metrics_of(tmp_path / "run")[1:]
    assert all(row["train/distill_loss"] > 0 and row["train/grad_norm"] > 0 for row in rows)
