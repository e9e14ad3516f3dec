"""A stage that is registered from outside runs in both runtimes, on one rank and on two."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from practicum.dataplane.stages import StageSpec
from practicum.roles.stage_table import make_plan, register_stage
from practicum.trainer.run import train_loaded
from tests.cluster import local_ray

from .recipes import tiny
from .test_ray import on_ray
from .test_run import metrics_of

TRAIN = {"train": {"steps": 2, "prompts": 3, "minibatches": 2, "lr": 1e-3}, "eval": {"rows": 2}}


@pytest.fixture(autouse=True)
def registered(own_registries: None) -> None:
    """The two stages of `own_stage` and its field, for one test."""
    sys.modules.pop("tests.trainer.own_stage", None)  # it registers its field when it is imported
    own_stage = importlib.import_module("tests.trainer.own_stage")
    register_stage("surprise", after="advantages")(own_stage.surprise)
    register_stage("mean_surprise", after="surprise")(own_stage.mean_surprise)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with local_ray(cpus=8):
        yield


def surprises(folder: Path) -> list[dict[str, float]]:
    rows = metrics_of(folder)[1:]
    return [{name: value for name, value in row.items() if "surprise/" in name} for row in rows]


def test_a_stage_from_outside_runs_with_its_own_field_and_its_report_is_a_metric(tmp_path: Path):
    loaded = tiny(tmp_path, **TRAIN)
    names = [stage.name for stage in make_plan(loaded.recipe)]
    assert names[names.index("advantages") :][:3] == ["advantages", "surprise", "mean_surprise"]
    train_loaded(loaded, tmp_path / "run")
    for number, row in enumerate(surprises(tmp_path / "run"), start=1):
        assert row["mean_surprise/rows"] == 12, "padding is no row of a stage"
        assert row["mean_surprise/step"] == number
        assert row["mean_surprise/mean"] > 0


@pytest.mark.slow
def test_a_stage_from_outside_computes_the_same_on_ray(tmp_path: Path, ray_cluster: None):
    train_loaded(tiny(tmp_path, **TRAIN), tmp_path / "local")
    train_loaded(tiny(tmp_path, **on_ray(TRAIN, ranks=2)), tmp_path / "ray")
    local, on_two_ranks = surprises(tmp_path / "local"), surprises(tmp_path / "ray")
    for here, there in zip(local, on_two_ranks, strict=True):
        assert here == pytest.approx(there, abs=1e-6)


@pytest.mark.parametrize("after", ["rollout", "sync", "nowhere"])
def test_a_stage_that_could_not_run_there_is_refused(tmp_path: Path, after: str):
    register_stage("late", after=after)(
        lambda recipe: StageSpec("late", use="tests.trainer.own_stage:SurpriseRole")
    )
    with pytest.raises(ValueError, match=f"stage 'late' can't be registered: .* it comes after '{after}'"):
        make_plan(tiny(tmp_path).recipe)
