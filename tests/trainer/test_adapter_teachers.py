"""Teachers that are adapters: one base in memory, the scores of merged models, wherever they live."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.checks.watch import Watch
from practicum.dataplane.ragged import Ragged
from practicum.engines.protocol import ScoreOptions, ScoreRequest
from practicum.engines.torch import make_torch
from practicum.errors import RecipeError, RecipeErrors
from practicum.models.load_model import load_model, load_tokenizer
from practicum.models.lora import is_adapter, merged_weights
from practicum.recipe.load_recipe import LoadedRecipe
from practicum.recipe.schema.recipe import Model
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import make_plan
from practicum.runtime import local
from practicum.runtime.local import LocalRoles, start_local
from practicum.tasks.stream import make_stream
from practicum.teachers.load_teachers import load_colocated, make_group
from practicum.trainer import preflight
from practicum.trainer.run import train_loaded
from practicum.trainer.sample_step import TRAIN, training_attempts

from ..teachers.test_check import tokenizer_of
from ..teachers.tiny_teachers import save_adapter, save_teacher
from .recipes import tiny
from .test_run import metrics_of

NAMES = ("copy", "compare")
COMMON: dict[str, Any] = {
    "train": {"steps": 2, "prompts": 4, "lr": 1e-2},
    "rollout": {"samples": 2, "max_new_tokens": 6, "max_num_seqs": 16},
    "reward": {"weight": 0.0},
    "eval": {"rows": 0},
    "route": {"by": "task"},
}
SIGNALS = {
    "sampled": {"divergence": "k2", "signal": "sampled"},
    "top_k": {"top_k": 5},
    "full": {"signal": "full"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two adapters on it, and both merged into models of their own."""
    root = tmp_path_factory.mktemp("adapters")
    base = save_teacher(root / "base", seed=0)
    for seed, name in enumerate(NAMES):
        model = save_adapter(root / name / "adapter", base, seed=seed, rank=2 + seed)
        merged = load_model(Model(path=base), 0)
        merged.load_state_dict(dict(merged_weights(model)), strict=False)
        merged.save_pretrained(root / name / "merged")
        load_tokenizer(Model(path=base)).save_pretrained(root / name / "merged")
    return root


def recipe(
    folder: Path, tmp_path: Path, *overrides: str, lora: bool = True, each: Any = (), **sections: Any
) -> LoadedRecipe:
    """Two adapter teachers of a student on their base; `each` are further keys of a teacher."""
    teachers = {name: {"adapter": str(folder / name)} | dict(each) for name in NAMES}
    model = {"path": str(folder / "base")} | ({"lora": {"rank": 4}} if lora else {})
    return tiny(
        tmp_path, *overrides, **(COMMON | {"model": model, "teachers": teachers, "distill": {}} | sections)
    )


def whole(folder: Path) -> dict[str, Any]:
    """The same teachers as models of their own."""
    return {name: {"model": str(folder / name / "merged")} for name in NAMES}


@contextmanager
def started(loaded: LoadedRecipe) -> Iterator[LocalRoles]:
    roles = start_local(loaded.recipe, make_plan(loaded.recipe), Watch(loaded.recipe.checks, print))
    try:
        yield roles
    finally:
        roles.close()


def taught(loaded: LoadedRecipe) -> tuple[dict[str, Ragged], LocalRoles]:
    """What the teachers write of a few answers, and the roles, which are closed."""
    spec = loaded.recipe
    with started(loaded) as roles:
        attempts = training_attempts(spec, make_stream(spec.tasks, spec.seed).take(6), roles.stop)
        batch = roles.rollout.rollout(attempts, TRAIN, seed=spec.seed)
        assert roles.rank.teachers is not None
        roles.stages["teachers"](StepInfo(batch, prompts=roles.rollout.prompts))
        columns = roles.store.get(batch, roles.rank.plan["teachers"].writes)
        assert {tags.teacher for tags in batch.tags} == {*NAMES}
    return {name: column for name, column in columns.items() if isinstance(column, Ragged)}, roles


def bases(roles: LocalRoles) -> list[Any]:
    assert roles.frozen.teachers is not None
    return [teacher.scorers[0] for teacher in roles.frozen.teachers.scorers.values()]


@pytest.mark.parametrize("signal", SIGNALS)
def test_scores_are_those_of_merged_models(folder: Path, tmp_path: Path, signal: str):
    distill = {"distill": SIGNALS[signal]}
    adapters, roles = taught(recipe(folder, tmp_path, **distill))
    one, other = bases(roles)
    assert one is other
    student = {id(p) for p in roles.rank.student.learner.model.parameters()}
    frozen = [p for name, p in one.model.named_parameters() if not is_adapter(name)]
    assert all(id(p) in student for p in frozen), "the base is the student's own in memory"
    merged, _ = taught(recipe(folder, tmp_path, **distill, teachers=whole(folder)))
    for name, column in merged.items():
        if column.values.is_floating_point():
            torch.testing.assert_close(adapters[name].values, column.values, rtol=0, atol=2e-4)
        else:
            assert torch.equal(adapters[name].values, column.values)
    if signal == "full":
        assert roles.frozen.teachers is not None
        heads = roles.frozen.teachers.heads.values()
        own = roles.rank.student.learner.model.get_output_embeddings().weight  # pyright: ignore
        assert {head.weight.data_ptr() for head in heads} == {own.data_ptr()}, "and so is its head"


def test_a_process_of_its_own_loads_the_base_and_gives_the_same_bits(folder: Path, tmp_path: Path):
    """What the process of such a teacher does, in this one."""
    spec = recipe(folder, tmp_path).recipe
    row, options, scores = ScoreRequest([*range(9, 20)], 4), ScoreOptions(top_k=3), []
    for student in (None, load_model(spec.model, spec.seed)):
        copy = {"copy": spec.teachers["copy"]}
        scorer = load_colocated(make_group(copy, spec.distill, spec.model, spec.seed, student))["copy"]
        scores.append(asyncio.run(scorer.score(row, options)))
        scorer.close()
    assert torch.equal(scores[0].logprobs, scores[1].logprobs)


def test_a_run_learns_as_from_merged_models(folder: Path, tmp_path: Path):
    rows = []
    ways: dict[str, dict[str, Any]] = {"adapters": {}, "whole": {"teachers": whole(folder)}}
    for name, sections in ways.items():
        train_loaded(recipe(folder, tmp_path, **sections), tmp_path / name)
        rows.append(metrics_of(tmp_path / name)[1:])
    for mine, theirs in zip(*rows, strict=True):
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-4)
        assert all(mine[f"teacher/{name}/wakes"] == 0 for name in NAMES), "nothing sleeps or wakes"
        assert all(theirs[f"teacher/{name}/wakes"] == 1 for name in NAMES)
        assert all(mine[f"teacher/{name}/seconds"] > 0 for name in NAMES)


def test_a_student_with_all_weights_has_the_base_loaded_once_and_frozen(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded: list[Any] = []

    def counted(spec: Model, seed: int, **options: Any) -> Any:
        loaded.append(load_model(spec, seed, **options))
        return loaded[-1]

    for module in (local, make_torch):
        monkeypatch.setattr(module, "load_model", counted)
    train_loaded(recipe(folder, tmp_path, lora=False), tmp_path / "run")
    student, base = loaded
    start = load_model(Model(path=str(folder / "base")), 0)
    kept = {name: p for name, p in base.named_parameters() if not is_adapter(name)}
    assert all(
        torch.equal(kept[n.replace("weight", "base_layer.weight")] if n not in kept else kept[n], p)
        for n, p in start.named_parameters()
    )
    assert not all(torch.equal(a, b) for a, b in zip(student.parameters(), start.parameters(), strict=True))


def test_a_model_and_adapters_on_it_are_one_that_sleeps_and_wakes(folder: Path, tmp_path: Path):
    base = str(folder / "base")
    teachers = {"copy": {"model": base, "adapter": str(folder / "copy")}, "compare": {"model": base}}
    sections: dict[str, Any] = {"model": {"random_init": {"hidden": 32, "context": 64}}, "teachers": teachers}
    roomy, roles = taught(recipe(folder, tmp_path, **sections))
    one, other = bases(roles)
    assert one is other
    tight: dict[str, Any] = sections | {"runtime": {"threads": 1, "teachers_gb": 1e-6}}
    offloaded, roles = taught(recipe(folder, tmp_path, **tight))
    assert roles.frozen.residency.level("the base of compare, copy") == "disk"
    assert roles.frozen.residency.wakes == {"the base of compare, copy": 1}
    assert all(torch.equal(offloaded[name].values, column.values) for name, column in roomy.items())


def test_the_same_adapter_twice_is_loaded_once(folder: Path, tmp_path: Path):
    teachers = {
        "copy": {"adapter": str(folder / "copy")},
        "compare": {"adapter": str(folder / "copy" / "adapter"), "prompt_prefix": "Careful: "},
    }
    _, roles = taught(recipe(folder, tmp_path, teachers=teachers))
    base = bases(roles)[0]
    assert len(base.runner.adapters.names) == 1


def problems(loaded: LoadedRecipe) -> str:
    """What is refused before any weights are loaded."""
    with pytest.raises((RecipeError, RecipeErrors)) as caught:
        preflight.check_without_models(loaded.recipe)
    return str(caught.value)


def test_check_tells_what_each_adapter_is_on_and_refuses_others(folder: Path, tmp_path: Path):
    found = preflight.preflight(recipe(folder, tmp_path)).findings
    assert any(
        line.startswith("teacher copy: an adapter of rank 2 (0.00M parameters) on the student's base, ")
        and line.endswith("the student's vocabulary")
        for line in found
    )
    full = preflight.check_without_models(recipe(folder, tmp_path, lora=False).recipe).findings
    assert any("loaded separately because the student trains all its weights" in line for line in full)
    other = save_teacher(tmp_path / "other", seed=1)
    with pytest.raises(RecipeError, match=r"(?s)teachers\.\w+\.adapter: .*trained on another base"):
        preflight.preflight(recipe(folder, tmp_path, f"model.path={other}"))
    wide = save_teacher(tmp_path / "wide", seed=1, hidden=48)
    text = problems(recipe(folder, tmp_path, f"model.path={wide}"))
    assert "teachers.compare.adapter" in text
    assert "set teachers.copy.model to the model that it was trained on" in text
    assert "a folder with adapter_config.json" in problems(
        recipe(folder, tmp_path, "teachers.copy.adapter=no")
    )


def test_an_adapter_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path):
    own = shutil.copytree(folder / "copy" / "adapter", tmp_path / "adapter")
    tokenizer_of("abc").save_pretrained(own)
    text = problems(recipe(folder, tmp_path, f"teachers.copy.adapter={own}"))
    assert "teachers.copy.adapter: found a vocabulary of" in text
