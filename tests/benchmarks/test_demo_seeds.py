"""The table of seeds in recipes/mopd belongs to the recipes as they are, and its seeds hold their bands."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import demo_seeds
from practicum.commands.demo import shortfalls


def test_the_table_is_that_of_the_stored_runs(tmp_path: Path) -> None:
    again = tmp_path / "README.md"
    again.write_text(demo_seeds.README.read_text())
    demo_seeds.write(again)
    assert again.read_text() == demo_seeds.README.read_text(), "run: python -m benchmarks.demo_seeds"


def test_every_seed_holds_its_bands() -> None:
    tables = demo_seeds.stored()
    stale = "the recipes have changed; run: python -m benchmarks.demo_seeds"
    assert list(tables) == [str(seed) for seed in demo_seeds.SEEDS], stale
    assert {seed: found for seed, rows in tables.items() if (found := shortfalls(rows))} == {}


def test_a_seed_is_kept_beside_those_of_the_same_recipes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_seeds, "STORED", tmp_path / "seeds.json")
    rows = {"base": {"copy": 0.5, "mean": 0.5}}
    demo_seeds.store(3, rows)
    demo_seeds.store(1, rows)
    assert list(demo_seeds.stored()) == ["1", "3"]
    changed = {**demo_seeds.recipes_now(), "base": {"seed": 7}}
    monkeypatch.setattr(demo_seeds, "recipes_now", lambda: changed)
    demo_seeds.store(2, rows)
    assert list(demo_seeds.stored()) == ["2"]
