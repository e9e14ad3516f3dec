"""`practicum serve` with adapters: each is a model of the server, and says what a merged one does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedModel
from typer.testing import CliRunner

from practicum.cli import app
from practicum.engines.protocol import ScoreOptions, Scores
from practicum.errors import RecipeError, ServeError
from practicum.models.adapter_files import SavedAdapter
from practicum.models.load_model import load_model
from practicum.models.lora import merged_weights, put_adapters
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.serving.serve import ServeOptions, announcement, resolve
from practicum.teachers.remote_teacher import RemoteScorer, probe_teacher
from tests.serving.servers import MODEL, Served, served
from tests.teachers.models import in_process, rows, score_rows
from tests.teachers.tiny_teachers import save_adapter, save_teacher

NAMES = ("copy", "sort")
ROWS, WANTED = rows(6), ScoreOptions(top_k=4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    base = save_teacher(root / "base", seed=0)
    for seed, name in enumerate(NAMES):
        save_adapter(root / name, base, seed=seed)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    model = load_model(Model(path=str(root / "base")), 0)
    saved = {name: SavedAdapter.read(str(root / name), "--adapter") for name in NAMES}
    put_adapters(model, {one.fingerprint: one for one in saved.values()}, "the base")
    with served(model, adapters={name: one.fingerprint for name, one in saved.items()}) as server:
        yield server


def merged(root: Path, seed: int, name: str) -> PreTrainedModel:
    """An adapter in a model of its own."""
    adapted = save_adapter(root / f"again-{name}", str(root / "base"), seed=seed)
    model = load_model(Model(path=str(root / "base")), 0)
    model.load_state_dict(dict(merged_weights(adapted)), strict=False)
    return model


def ask(server: Served, name: str) -> list[Scores]:
    async def run() -> list[Scores]:
        teacher = RemoteScorer("far", Teacher(url=server.url, model=name))
        try:
            await probe_teacher(teacher, WANTED, 60, 100)
            return await score_rows(teacher, ROWS, WANTED)
        finally:
            await teacher.aclose()

    return asyncio.run(run())


def test_scores_by_an_adapters_name_are_those_of_the_merged_model(server: Served, root: Path):
    models = {name: merged(root, seed, name) for seed, name in enumerate(NAMES)}
    models[MODEL] = load_model(Model(path=str(root / "base")), 0)
    said = {}
    for name, model in models.items():
        said[name] = ask(server, name)
        for got, here in zip(said[name], in_process(model, ROWS, WANTED), strict=True):
            torch.testing.assert_close(got.logprobs, here.logprobs, rtol=0, atol=2e-4)
    assert (said["copy"][0].logprobs - said["sort"][0].logprobs).abs().max() > 1e-2


def test_a_name_that_the_server_does_not_have_is_reported_with_those_that_it_has(server: Served):
    with pytest.raises(RecipeError, match=r"teachers\.far\.model: found other.*copy, sort, tiny"):
        ask(server, "other")


def options(root: Path, **more: Any) -> ServeOptions:
    adapters = tuple((name, str(root / name)) for name in NAMES)
    given: dict[str, Any] = {"model": str(root / "base"), "adapters": adapters} | more
    return ServeOptions(**given)


def test_the_line_for_a_recipe_has_a_teacher_for_each_adapter(root: Path):
    first, line = announcement(resolve(options(root)), 8123).splitlines()
    assert "and its adapters copy, sort at" in first
    teachers = {name: Teacher(**entry) for name, entry in yaml.safe_load(line)["teachers"].items()}
    assert {name: teacher.model for name, teacher in teachers.items()} == {"copy": "copy", "sort": "sort"}


def test_adapters_that_can_not_be_served_are_refused_before_anything_is_loaded(root: Path, tmp_path: Path):
    twice = (("copy", str(root / "copy")), ("copy", str(root / "sort")))
    with pytest.raises(ServeError, match="--adapter copy="):
        resolve(options(root, adapters=twice))
    with pytest.raises(
        RecipeError, match=r"--adapter: found .*nowhere, expected a folder with adapter_config"
    ):
        resolve(options(root, adapters=(("copy", str(tmp_path / "nowhere")),)))
    other = save_teacher(tmp_path / "other", seed=1, hidden=48)
    with pytest.raises(RecipeError, match=r"^--adapter: found .*an adapter of another base"):
        resolve(options(root, model=other))
    done = CliRunner().invoke(app, ["serve", str(root / "base"), "--adapter", "copy"])
    assert done.exit_code == 2
    assert "expected NAME=PATH" in done.output
