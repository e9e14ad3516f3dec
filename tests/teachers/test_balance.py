"""How teachers share the loss: factors by spread, and feedback on shares of the update."""

from __future__ import annotations

import random
from math import exp
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
import yaml

from practicum.dataplane.ragged import Columns
from practicum.errors import PracticumError, RecipeErrors
from practicum.recipe.load_recipe import LoadedRecipe, load_recipe
from practicum.roles.rollout import RolloutRole
from practicum.roles.run_stage import StepInfo
from practicum.teachers.balance import UpdateBalance, spread_factors
from practicum.trainer.run import train_loaded
from tests.trainer.test_run import metrics_of, weights_of

from .tiny_teachers import save_teacher, teachers_recipe

TARGETS = {"small": 0.7, "wide": 0.3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("teachers")
    scales = {"small": (1, 2.0), "wide": (2, 6.0)}
    return {name: save_teacher(root / name, seed=seed, scale=scale) for name, (seed, scale) in scales.items()}


def write(folder: Path, folders: dict[str, str], steps: int, **route: Any) -> LoadedRecipe:
    path = folder / "recipe.yaml"
    sections = {
        "teachers": {name: {"model": model} for name, model in folders.items()},
        "route": {"by": "task", "map": {"copy": "small", "compare": "wide"}, **route},
        "distill": {"divergence": "k2", "signal": "sampled"},
        "train": {"steps": steps, "prompts": 32, "lr": 1e-4},
        "rollout": {"samples": 4, "max_new_tokens": 12, "max_num_seqs": 64},
    }
    path.write_text(yaml.safe_dump(teachers_recipe(**sections)))
    return load_recipe(path)


def test_factors_are_clipped_ratios_of_spreads():
    torch.manual_seed(0)
    tokens = {0: torch.randn(400) * 2 + 1, 1: torch.randn(900) * 0.05, 2: torch.randn(199) * 9}
    moments = {i: (len(x), float(x.sum()), float(x.square().sum())) for i, x in tokens.items()}
    whole = pstdev(torch.cat([*tokens.values()]).tolist())
    found = spread_factors(moments)
    assert found[0] == pytest.approx(whole / pstdev(tokens[0].tolist()), rel=1e-4)
    assert found[1] == 4.0
    assert found[2] == 1.0, "few tokens have no spread to go by"
    assert spread_factors({}) == {}


@pytest.mark.parametrize("powers", [(1.0, 1.0), (2.0, 1.0), (1.0, 8.0)])
def test_feedback_holds_the_mean_share_however_noisy_single_steps_are(powers: tuple[float, float]):
    balance, draws = UpdateBalance({0: 0.2, 1: 0.8}), random.Random(0)
    relative: list[float] = []
    for step in range(100):
        pulls = [balance.factors.get(i, 1.0) * powers[i] * exp(draws.gauss(0, 0.5)) for i in (0, 1)]
        pulls[1] *= 0.05 if step < 2 else 1.0  # at first almost nothing is left to learn from it
        momentum = draws.uniform(0.1, 2.0)
        relative.append(pulls[0] / sum(pulls))
        balance.adapt({0: momentum * relative[-1], 1: momentum * (1 - relative[-1])}, {})
    assert pstdev(relative) > 0.05
    assert fmean(relative) == pytest.approx(0.2, abs=0.01)
    again = UpdateBalance({0: 0.2, 1: 0.8})
    again.load_state_dict(balance.state_dict())
    for control in (balance, again):
        control.adapt({0: 0.1, 1: 0.3}, {})
    assert again.factors == balance.factors != {0: 1.0, 1: 1.0}


def test_a_teacher_that_works_against_the_step_gets_more():
    balance = UpdateBalance()
    balance.adapt({0: -0.1, 1: 0.5}, {0: 1, 1: 1})
    assert balance.factors[0] > 1 > balance.factors[1]
    before = dict(balance.factors)
    balance.adapt({0: -0.2, 1: 0.1}, {0: 1, 1: 1})
    assert balance.factors == before, "a step against all of them says nothing"


def test_sigma_weighs_tokens_by_the_spread_over_the_rollout(
    tmp_path: Path, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    apart: dict[str, list[float]] = {}
    clear = RolloutRole.clear

    def keep(self: RolloutRole, step: StepInfo) -> None:
        names = ("teacher_logprobs", "plain_logprobs")
        batch = step.batch.real()
        columns = Columns("test", self.store.get(batch, names))
        rows = zip(*(columns.ragged(name).rows for name in names), strict=True)
        for tags, (teacher, student) in zip(batch.tags, rows, strict=True):
            apart.setdefault(tags.teacher or "", []).extend((teacher - student).tolist())
        clear(self, step)

    monkeypatch.setattr(RolloutRole, "clear", keep)
    train_loaded(write(tmp_path, folders, 1, balance="sigma"), tmp_path / "run")
    assert min(map(len, apart.values())) >= 200
    whole = pstdev([x for tokens in apart.values() for x in tokens])
    weights = {name: len(x) * min(max(whole / pstdev(x), 0.25), 4.0) for name, x in apart.items()}
    row = metrics_of(tmp_path / "run")[-1]
    for name, weight in weights.items():
        found = row[f"teacher/{name}/loss_share"]
        assert found == pytest.approx(weight / sum(weights.values()), rel=1e-4)
        assert abs(found - row[f"teacher/{name}/tokens_share"]) > 0.01


def test_feedback_on_the_update_goes_on_after_a_stop(tmp_path: Path, folders: dict[str, str]):
    route = {"balance": "update", "shares": TARGETS}
    train_loaded(write(tmp_path, folders, 3, **route), tmp_path / "run")
    rows = metrics_of(tmp_path / "run")[1:]
    assert all("teacher/small/update_share" in row for row in rows), "every step is measured"
    assert abs(rows[-1]["teacher/small/loss_share"] - rows[-1]["teacher/small/tokens_share"]) > 1e-3
    train_loaded(write(tmp_path, folders, 2, **route), tmp_path / "part")
    train_loaded(write(tmp_path, folders, 3, **route), tmp_path / "part", resume=True, change=True)
    whole, part = weights_of(tmp_path / "run"), weights_of(tmp_path / "part")
    assert all(torch.equal(x, part[name]) for name, x in whole.items())


def test_balances_that_can_not_be_held_are_refused(tmp_path: Path, folders: dict[str, str]):
    for route in ({"balance": "shares"}, {"balance": "sigma", "shares": TARGETS}):
        with pytest.raises(RecipeErrors, match=r"route\."):
            write(tmp_path, folders, 1, **route)
    loaded = write(tmp_path, folders, 1, balance="update")
    loaded = load_recipe(loaded.source, ["train.optimizer=adamw_8bit"])
    with pytest.raises(PracticumError, match=r"route\.balance"):
        train_loaded(loaded, tmp_path / "run")
