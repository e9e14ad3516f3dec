"""Teachers that are adapters, by vLLM: one engine has their base, and rows are scored by their adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.errors import EngineError
from practicum.models.load_model import load_model
from practicum.recipe.schema.recipe import Recipe
from practicum.teachers.load_teachers import Teachers, load_teachers
from tests.teachers.models import rows
from tests.teachers.tiny_teachers import save_adapter
from tests.vllm.models import save_model

TOLERANCE = 2e-4
"""Nats; the weights are ten times those of a new model, and the differences are too."""
NAMES = ("sort", "copy", "again", "plain")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    save_model(root / "base")
    for seed, name in enumerate(("sort", "copy")):
        save_adapter(root / name, str(root / "base"), seed=seed, rank=4 + 8 * seed)
    return root


def load(folder: Path, engine: str, *, lent: bool = False, **each: Any) -> Teachers:
    """Four teachers on one base: two adapters, one of them twice, and the base itself.

    With `lent`, two adapters on the base of the student, which has an adapter of its own.
    """
    base, chosen = str(folder / "base"), {"engine": engine} | each
    on = {} if lent else {"model": base}
    teachers = {name: {"adapter": str(folder / name), **on, **chosen} for name in ("sort", "copy")}
    if not lent:
        teachers["again"] = {**teachers["sort"], "prompt_prefix": "so: "}
        teachers["plain"] = {"model": base, **chosen}
    recipe = Recipe.model_validate(
        {
            "name": "adapters",
            "model": {"path": base, "lora": {"rank": 2}},
            "tasks": {name: {"kind": "sort"} for name in teachers},
            "teachers": teachers,
            "route": {"by": "task"},
            "distill": {"top_k": 8},
            "runtime": {"threads": 1},
        }
    )
    student = load_model(recipe.model, 0)
    return load_teachers(recipe.teachers, recipe.distill, recipe.runtime, recipe.model, 0, student)


@pytest.fixture(scope="module")
def by_vllm(folder: Path) -> Iterator[Teachers]:
    teachers = load(folder, "vllm", context=100)
    yield teachers
    teachers.close()


@pytest.fixture(scope="module")
def by_torch(folder: Path) -> Iterator[Teachers]:
    teachers = load(folder, "torch", context=100)
    yield teachers
    teachers.close()


def base_of(teachers: Teachers) -> VllmEngine:
    """The one engine of all teachers."""
    (engine,) = {scorer for teacher in teachers.scorers.values() for scorer in teacher.scorers}
    assert isinstance(engine, VllmEngine)
    return engine


def score(
    teachers: Teachers, asked: Sequence[tuple[str, ScoreRequest]], options: ScoreOptions
) -> list[Scores]:
    async def run() -> list[Scores]:
        return await asyncio.gather(*(teachers.scorers[name].score(row, options) for name, row in asked))

    with teachers.awake(asked[0][0]):
        return asyncio.run(run())


def mixed(names: Sequence[str]) -> list[tuple[str, ScoreRequest]]:
    """The same rows for each teacher, so that neighbours in a pass have different adapters."""
    return [(name, row) for row in rows(8) for name in names]


@pytest.mark.parametrize("top_k", [0, 8])
def test_rows_of_several_adapters_in_one_pass_are_scored_each_by_its_own(
    by_vllm: Teachers, by_torch: Teachers, top_k: int
):
    asked, options = mixed(NAMES), ScoreOptions(top_k=top_k)
    here, there = (score(teachers, asked, options) for teachers in (by_torch, by_vllm))
    for mine, theirs in zip(there, here, strict=True):
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=0, atol=TOLERANCE)
        if top_k:
            assert mine.topk_logprobs is not None
            torch.testing.assert_close(mine.topk_logprobs, theirs.topk_logprobs, rtol=0, atol=TOLERANCE)
    logprobs = {
        name: torch.cat([s.logprobs for (who, _), s in zip(asked, there, strict=True) if who == name])
        for name in NAMES
    }
    assert torch.equal(logprobs["sort"], logprobs["again"])
    for one, other in (("sort", "copy"), ("sort", "plain"), ("copy", "plain")):
        assert (logprobs[one] - logprobs[other]).abs().max() > 0.05, f"{one} is not {other}"


def test_asleep_the_base_is_freed_and_comes_back_with_its_adapters(by_vllm: Teachers):
    asked = mixed(NAMES)
    before = score(by_vllm, asked, ScoreOptions())
    engine = base_of(by_vllm)
    assert (engine._setup.adapters, engine._setup.rank) == (2, 12), "each adapter is there once"
    assert engine.memory().weights == 0, "it sleeps since it was asked"
    with pytest.raises(EngineError, match="sleeps"):
        engine.fingerprint()
    for one, other in zip(score(by_vllm, asked, ScoreOptions()), before, strict=True):
        assert torch.equal(one.logprobs, other.logprobs)
    assert by_vllm.wakes["sort"] == by_vllm.wakes["plain"] >= 2


def test_adapters_on_the_students_base_in_a_process_of_their_own(folder: Path):
    asked, options = mixed(("sort", "copy")), ScoreOptions(top_k=4)
    scores = []
    for engine, each in (("vllm", {"placement": "own"}), ("torch", {})):
        teachers = load(folder, engine, lent=True, **each)
        try:
            scores.append(score(teachers, asked, options))
        finally:
            teachers.close()
    for mine, theirs in zip(*scores, strict=True):
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=0, atol=TOLERANCE)
