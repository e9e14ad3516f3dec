"""A tiny teacher on disk, its rows, and what an engine in this process says of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from practicum.concurrency.gather import gather_all
from practicum.engines.protocol import ScoreOptions, Scorer, ScoreRequest, Scores
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.teachers.load_teachers import PLACEMENTS, make_group
from practicum.teachers.teacher_scorer import TeacherScorer
from tests.engines.engines import engine_of, prompts, tiny
from tests.teachers.tiny_teachers import teachers_recipe


def scorer_of(spec: Teacher, name: str = "math", **sections: Any) -> TeacherScorer:
    """A teacher where its spec places it; one in separate processes is not ready yet."""
    recipe = Recipe.model_validate(teachers_recipe(teachers={name: spec}, **{"distill": {}} | sections))
    group = make_group(recipe.teachers, recipe.distill, recipe.model, recipe.seed)
    return PLACEMENTS[spec.placement_name](group)[name]


async def score_rows(
    scorer: TeacherScorer | Scorer, some: Sequence[ScoreRequest], options: ScoreOptions
) -> list[Scores]:
    """Scores of all rows, asked for concurrently."""
    return await gather_all(scorer.score(row, options) for row in some)


def save_tiny(folder: Path, family: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    """Save a tiny model into a folder, and give it."""
    model = tiny(family, seed)
    model.save_pretrained(folder)
    return model


def rows(count: int, seed: int = 0, shortest: int = 4, longest: int = 60) -> list[ScoreRequest]:
    """Rows of various lengths; each has a prompt of about a third."""
    made = prompts(count, seed=seed, shortest=shortest, longest=longest)
    return [ScoreRequest(ids, max(1, len(ids) // 3), f"prompt {i}/session 0") for i, ids in enumerate(made)]


def in_process(model: PreTrainedModel, some: Sequence[ScoreRequest], wanted: ScoreOptions) -> list[Scores]:
    """Scores of the rows by a torch engine here, one row at a time."""

    async def run() -> list[Scores]:
        return [await engine.score(row, replace(wanted, vocab=None)) for row in some]

    with engine_of(model) as engine:
        return asyncio.run(run())


def assert_same(got: Sequence[Scores], expected: Sequence[Scores]) -> None:
    """Bit for bit the same scores."""
    for one, other in zip(got, expected, strict=True):
        for field in ("logprobs", "topk_ids", "topk_logprobs", "hidden"):
            a, b = getattr(one, field), getattr(other, field)
            if b is None:
                assert a is None, field
            else:
                assert a.dtype == b.dtype, field
                assert a.shape == b.shape, field
                assert torch.equal(a, b), field
