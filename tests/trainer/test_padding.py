"""Padding rows change nothing: not a bit of the weights, not a metric but their own count."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from practicum.roles.padding import BatchCutter
from practicum.runtime.local import LocalRoles
from practicum.trainer.run import train_loaded
from practicum.trainer.step import StepRunner

from ..teachers.tiny_teachers import save_teacher
from .recipes import tiny
from .test_run import metrics_of, without_times

UNEVEN = {
    "agent": {"loop": "tests.trainer.loops:uneven"},
    "reward": {"functions": [{"use": "tests.trainer.rewards:by_letters"}]},
}


def steps(**train: int) -> dict[str, Any]:
    return {"steps": 2, "prompts": 3, "lr": 1e-3, **train}


SMALL = {"hidden": 32, "layers": 2, "heads": 2}
RECIPES: dict[str, dict[str, Any]] = {
    "minibatches": {"train": steps(epochs=2, minibatches=4)},
    "rows": {"train": steps(minibatch_size=5)},
    "ppo": {
        "train": steps(minibatch_size=4),
        "algorithm": {"advantage": "gae", "lam": 0.95, "kl": {"place": "loss"}, "mismatch": "sequence"},
        "critic": {"warmup_steps": 1},
    },
    "gspo": {
        "train": steps(minibatches=3),
        "algorithm": {"advantage": "rloo", "loss": "gspo", "aggregation": "seq_mean_token_mean"},
    },
    "whitened": {
        "train": steps(minibatches=2),
        "algorithm": {"advantage": "reinforce_pp", "entropy": 0.01, "aggregation": "seq_mean_token_sum"},
    },
    "remax": {
        "train": steps(minibatch_size=7),
        "algorithm": {"advantage": "remax", "loss": "cispo", "kl": {"place": "reward", "target": 0.1}},
    },
    "moe": {
        "model": {"random_init": SMALL | {"family": "qwen3_moe", "context": 64, "experts": 4}},
        "train": steps(minibatches=2),
    },
    "vision": {
        "model": {"random_init": SMALL | {"family": "qwen2_5_vl", "context": 128}},
        "tasks": {"dots": {"kind": "dots"}, "copy": {"kind": "copy", "options": {"length": [1, 2]}}},
        "train": steps(minibatches=2),
    },
}


def ran(folder: Path, extra: int, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> Path:
    """A run with so many padding rows in each step."""
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(BatchCutter, "padding_rows", lambda *args: extra)
        train_loaded(tiny(folder, **(UNEVEN | sections)), folder / "run")
    return folder / "run"


def without_padding(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("padding/")} for row in without_times(rows)]


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's part."""
    saved: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in saved.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def weights(run: Path) -> dict[str, torch.Tensor]:
    """All that the run learnt: student, critic, and their optimizers' moments."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(run.glob("checkpoints/*/*/.metadata")):
        tensors = read_tensors(file.parent)
        assert any(name.startswith("model.") for name in tensors)
        assert any(name.startswith("optimizer.") for name in tensors)
        found |= {f"{file.parent.name}.{name}": tensor for name, tensor in tensors.items()}
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("ppo", "gspo", "rows") else pytest.mark.long)
        for name in RECIPES
    ],
)
def test_no_bit_of_a_run_depends_on_the_number_of_padding_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runs = [ran(tmp_path / str(n), n, monkeypatch, **RECIPES[name]) for n in (0, 1, 23)]
    first = weights(runs[0])
    assert first
    assert metrics_of(runs[0])[-1]["train/grad_norm"] > 0.01, "there is something to learn"
    for run, count in zip(runs[1:], (1, 23), strict=True):
        assert without_padding(metrics_of(run)) == without_padding(metrics_of(runs[0]))
        assert metrics_of(run)[1]["padding/rows"] == count
        other = weights(run)
        assert first.keys() == other.keys()
        assert all(torch.equal(first[key], other[key]) for key in first)


def test_padding_rows_have_what_teachers_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    teachers = {"t": {"model": save_teacher(tmp_path / "t", seed=5)}}
    for signal in ("top_k", "full"):
        sections = {
            "teachers": teachers,
            "distill": {"signal": signal, **({"top_k": 4} if signal == "top_k" else {})},
            "train": {"steps": 2, "prompts": 3, "minibatches": 2, "lr": 1e-3},
        }
        runs = [ran(tmp_path / f"{signal}{n}", n, monkeypatch, **sections) for n in (0, 9)]
        assert without_padding_seconds(runs[0]) == without_padding_seconds(runs[1])
        one, other = (weights(run) for run in runs)
        assert all(torch.equal(one[key], other[key]) for key in one)


def without_padding_seconds(run: Path) -> list[dict[str, Any]]:
    rows = without_padding(metrics_of(run))
    return [{k: v for k, v in row.items() if not k.endswith("/seconds")} for row in rows]


def test_a_step_is_filled_up_to_what_its_updates_need(tmp_path: Path):
    """12 sessions of 1, 2 or 3 rows each; the critic's mini-batches alone in the first step."""
    train_loaded(tiny(tmp_path, **(UNEVEN | RECIPES["ppo"])), tmp_path / "run")
    first, second = metrics_of(tmp_path / "run")[1:]
    rows = 3 * (1 + 2 + 3 + 1)
    assert first["padding/rows"] == -rows % 6
    assert second["padding/rows"] == -rows % 12
    assert second["padding/share"] == second["padding/rows"] / (rows + second["padding/rows"])


def test_the_padding_of_several_ranks_leaves_room_for_whole_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The roles are this process's: what is padded is as for four ranks."""
    begin = StepRunner.step

    def on_four_ranks(self: StepRunner, number: int) -> dict[str, float]:
        assert isinstance(self.roles, LocalRoles)
        padding = self.roles.rank.padding
        whole = padding.cutter.whole_sessions
        padding.cutter = BatchCutter(self.recipe.train, seed=0, whole_sessions=whole, ranks=4)
        return begin(self, number)

    monkeypatch.setattr(StepRunner, "step", on_four_ranks)
    train = {"steps": 2, "prompts": 3, "minibatches": 3, "lr": 1e-3}
    for loss in ("ppo_clip", "gspo"):
        sections = UNEVEN | {"train": train, "algorithm": {"loss": loss}}
        train_loaded(tiny(tmp_path, **sections), tmp_path / loss)
        for row in metrics_of(tmp_path / loss)[1:]:
            # Sessions that stay whole leave ranks unequal by up to their 3 rows, which padding levels.
            assert row["padding/rows"] == (-21 % 12 if loss == "ppo_clip" else 3 * 3 * 4 + -57 % 12)
