"""CONTRIBUTING's table of shape suffixes has every axis that the code names, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import practicum

SOURCE = Path(practicum.__file__).parent
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
SUFFIXED = re.compile(r"\b(?!lora_)[a-z][a-z0-9_]*_([A-Z][A-Z1]*)\b")
"""PEFT calls its two matrices lora_A and lora_B."""


def test_the_legend_of_shape_suffixes_is_that_of_the_code():
    legend = set(re.findall(r"\| `_([A-Z1])` \|", CONTRIBUTING.read_text()))
    used = {
        axis
        for path in SOURCE.rglob("*.py")
        for suffix in SUFFIXED.findall(path.read_text())
        for axis in suffix
    }
    assert used == legend
