"""With the CPU kernels off, models compute by transformers, PEFT and torch alone, and runs work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from practicum.cpu import batch_invariance, switch
from practicum.cpu.batch_invariance import padded_keys, padded_rows, padded_tokens
from practicum.cpu.linears import is_product
from practicum.engines.torch.model_runner import ModelRunner
from practicum.trainer.run import train_loaded
from tests.engines.engines import plain_forward, tiny
from tests.learning.reference import adapted
from tests.trainer.recipes import tiny as tiny_recipe
from tests.trainer.test_run import metrics_of


@pytest.fixture(autouse=True)
def forget_probes() -> Iterator[None]:
    """The probes' results depend on the switch."""
    yield
    batch_invariance.attention_is_invariant.cache_clear()
    batch_invariance.activations_are_invariant.cache_clear()


def test_a_model_without_kernels_is_made_of_plain_modules(monkeypatch: pytest.MonkeyPatch):
    ids = [5, 9, 11, 13]
    expected = plain_forward(tiny(), ids)
    monkeypatch.setattr(switch, "ENABLED", False)
    for model in (tiny(), adapted("llama", torch.float32)):
        assert not any("forward" in vars(module) for module in model.modules())
        assert "OneDnnLinear" not in {type(module).__name__ for module in model.modules()}
        assert ModelRunner(model).lean is None
    assert not is_product(torch.zeros(4, 512), torch.zeros(512, 512))
    assert (padded_rows(3), padded_tokens(3, 100), padded_keys(3)) == (3, 3, 3)
    torch.testing.assert_close(plain_forward(tiny(), ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_run_works_without_kernels(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch):
    runs = []
    for name in ("on", "off"):
        monkeypatch.setattr(switch, "ENABLED", name == "on")
        recipe = tiny_recipe(tmp_path, f"model.random_init.family={family}")
        train_loaded(recipe, tmp_path / name)
        runs.append(metrics_of(tmp_path / name))
    assert len(runs[0]) == len(runs[1])
    assert all(row["train/gap_max"] < 1e-3 for row in runs[1][1:])
    assert runs[1][1]["train/entropy"] == pytest.approx(runs[0][1]["train/entropy"], abs=1e-3)
