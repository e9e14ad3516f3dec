"""The benchmark of adapters measures what it says, and its report reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import Measured

from benchmarks import lora_mopd, lora_step, report_lora

MACHINE = {"processor": "a processor", "cores": 2}


class Turns:
    """A race with one contender, which takes two turns."""

    def __init__(self) -> None:
        self.found: list[Measured] = []

    def serve(self, run: Any) -> None:
        # The peak of this process is not the contender's.
        self.found += [run(turn) | {"peak_mb": 1.0} for turn in range(2)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models that are made in no time."""
    monkeypatch.setitem(lora_step.SIZES, "4M", (128, 1))
    for module in (lora_step, "benchmarks.model", "benchmarks.stepping"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.CACHE", tmp_path)
    monkeypatch.setattr("benchmarks.stepping.model_folder", lambda: lora_step.random_folder(128, 1))


@pytest.mark.long
def test_three_adapters_are_one_model_in_memory_and_the_report_says_so(small: None):
    raced: dict[str, list[Measured]] = {}
    for kind in ("one whole", "three whole", "three adapters"):
        turns: Any = Turns()
        lora_step.taught(turns, kind, prompts=3, size="4M")
        raced[kind] = turns.found
    steps: dict[str, list[Measured]] = {}
    for rank in (None, 2):
        turns = Turns()
        lora_step.stepper(turns, "4M", rank, prompts=2)
        steps[f"4M, {rank}"] = turns.found
    tokens = {found[0]["tokens"] for found in raced.values()}
    assert len(tokens) == 1, "all score the same rows"
    share = {kind: found[0]["weights_mb"] / found[0]["model_mb"] for kind, found in raced.items()}
    assert share["one whole"] > 2
    assert share["three whole"] > 4
    assert share["three adapters"] < 2, "the adapters of such a small model are large"
    names = ("practicum, LoRA", "trl, LoRA", "practicum, all weights", "trl, all weights")
    found = {"ranks": {"4M": steps}, "trl": dict.fromkeys(names, steps["4M, 2"])}
    found |= {"teachers": raced, "settings": {"teachers_on": "4M"}, "machine": MACHINE}
    text = report_lora.lora_step(found)
    assert "1.0× (1.0 to 1.0) · goal 1.0× as with all weights, reached" in text
    held = {rank: steps[f"4M, {rank}"][1]["held_mb"] for rank in (None, 2)}
    model_mb = steps["4M, None"][1]["model_mb"]
    assert held[None] == pytest.approx(4 * model_mb, rel=0.01), "weights, gradients and two moments"
    assert held[2] < 1.5 * model_mb
    assert "Three adapters take" in text
    assert f"they are {share['three adapters']:.2f} of one model" in text


def test_the_table_of_the_recipe_belongs_to_its_results(tmp_path: Path):
    again = tmp_path / "README.md"
    again.write_text(lora_mopd.README.read_text())
    lora_mopd.write(again)
    assert again.read_text() == lora_mopd.README.read_text(), "run: python -m benchmarks.lora_mopd"
