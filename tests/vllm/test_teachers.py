"""Teachers that vLLM computes, beside a student that it samples with: scores, sleep, copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from practicum.concurrency.event_loop import run_async
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Ragged
from practicum.engines.protocol import ScoreRequest
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.run_stage import StepInfo
from practicum.runtime.local import LocalRoles
from practicum.tasks.stream import make_stream
from practicum.trainer.sample_step import TRAIN, training_attempts
from tests.vllm.models import MAKE, resident, save_model, started, update

TOLERANCE = 2e-5
KV_MB = 64
ROUTE = {"by": "task", "map": {"sort": "folder", "copy": "away", "reverse": "self"}}


def recipe_of(folder: str, engine: str, rollout: str) -> Recipe:
    by: dict[str, Any] = {"engine": engine}
    return Recipe.model_validate(
        {
            "name": "school",
            "model": {"random_init": MAKE},
            "tasks": {name: {"kind": name} for name in ("sort", "copy", "reverse")},
            "rollout": {"engine": rollout, "samples": 2, "max_new_tokens": 8, "temperature": 0.8}
            | ({"vllm": {"kv_cache_memory_bytes": KV_MB << 20}} if rollout == "vllm" else {}),
            "teachers": {
                "folder": {"model": folder, **by},
                "away": {"model": folder, "placement": "own", "context": 100, **by},
                "self": {"student": {"every": 1}, **by},
            },
            "route": ROUTE,
            "distill": {"top_k": 8},
            "runtime": {"threads": 1},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("teacher")
    save_model(path)
    return str(path)


@pytest.fixture(scope="module")
def roles(folder: str) -> Iterator[LocalRoles]:
    with started(recipe_of(folder, "vllm", "vllm")) as roles:
        yield roles


def roll_out(recipe: Recipe, roles: LocalRoles) -> BatchRef:
    drawn = make_stream(recipe.tasks, recipe.seed).take(9)
    return roles.rollout.rollout(training_attempts(recipe, drawn, roles.stop), TRAIN, seed=recipe.seed)


def teach(roles: LocalRoles, batch: BatchRef) -> None:
    roles.stages["teachers"](StepInfo(batch, prompts=roles.rollout.prompts))


def columns(roles: LocalRoles, batch: BatchRef) -> list[Ragged]:
    names = ("teacher_logprobs", "teacher_topk_ids", "teacher_topk_logprobs")
    found = roles.store.get(batch, names)
    return [column for name in names if isinstance(column := found[name], Ragged)]


def engine_of(roles: LocalRoles, name: str) -> VllmEngine:
    assert roles.rank.teachers is not None
    engine = roles.rank.teachers.loaded.scorers[name].scorers[0]
    assert isinstance(engine, VllmEngine)
    return engine


def test_teachers_of_both_engines_say_the_same(roles: LocalRoles, folder: str):
    """Of the same rows: colocated ones and those of their own, at another temperature than 1."""
    recipe = recipe_of(folder, "vllm", "vllm")
    batch = roll_out(recipe, roles)
    assert {tags.teacher for tags in batch.tags} == {"folder", "away", "self"}
    roles.refresh_copies(1)
    teach(roles, batch)
    with started(recipe_of(folder, "torch", "torch")) as peers:
        fields = ("prompt_ids", "response_ids", "response_mask")
        peers.store.put(batch, dict(roles.store.get(batch, fields)))
        faculty = peers.rank.teachers
        assert faculty is not None
        for name in ("folder", "away", "self"):
            mine = batch.where(lambda _, tags, name=name: tags.teacher == name)
            prompts = {key: roles.rollout.prompts[key] for key in mine.keys}
            run_async(faculty.score(StepInfo(mine, prompts=prompts)), timeout=60, owner="the test")
        for found, expected in zip(columns(roles, batch), columns(peers, batch), strict=True):
            torch.testing.assert_close(found.values, expected.values, rtol=0, atol=TOLERANCE)


def test_student_and_colocated_teachers_take_turns(roles: LocalRoles, monkeypatch: pytest.MonkeyPatch):
    """While one of them scores, the weights and KV memory of the others are given back."""
    recipe = recipe_of("", "vllm", "vllm")
    student, here = roles.engine, {name: engine_of(roles, name) for name in ("folder", "self")}
    assert isinstance(student, VllmEngine)
    batch = roll_out(recipe, roles)
    held: list[tuple[str, dict[str, bool], int]] = []
    for name, place in here.items():

        async def score(row: ScoreRequest, wanted: Any, *, name: str = name, place: Any = place) -> Any:
            awake = {n: p.memory().weights > 0 for n, p in here.items()}
            held.append((name, awake | {"student": student.memory().weights > 0}, resident(student.pid)))
            return await VllmEngine.score(place, row, wanted)

        monkeypatch.setattr(place, "score", score)
    before = resident(student.pid)
    teach(roles, batch)
    assert {name for name, *_ in held} == set(here)
    for name, awake, asleep in held:
        assert awake == {other: other == name for other in (*here, "student")}
        assert asleep < before - 0.8 * KV_MB * 2**20
    again = roll_out(recipe, roles)
    assert [tags.response_tokens for tags in again.tags] == [tags.response_tokens for tags in batch.tags]


def test_a_copy_takes_the_students_weights_and_keeps_them_asleep(roles: LocalRoles):
    assert roles.rank.teachers is not None
    place, learner = engine_of(roles, "self"), roles.rank.student.learner
    update(learner, 0.05)
    roles.sync_weights()
    roles.refresh_copies(2)
    with roles.rank.teachers.loaded.awake("self"):
        found = place.fingerprint()
    torch.testing.assert_close(found, learner.fingerprint(len(found) + 1), rtol=0, atol=TOLERANCE)
    assert place.version == learner.version
