"""The plots beside the JSON: one figure per benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib  # pyright: ignore[reportMissingImports]

from benchmarks.harness import RESULTS, Measured, medians, spread

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

Rounds = Mapping[str, Sequence[Measured]]
COLOURS = {"practicum": "#1b7f5c"}
OTHERS = ("#8a8f98", "#c2b280")


def bars(settings: Mapping[str, Rounds], measure: str, label: str, name: str) -> None:
    """Medians as bars, grouped by setting, with the range over the rounds."""
    figure, axes = plt.subplots(figsize=(7, 3.4))
    names = list(next(iter(settings.values())))
    width = 0.8 / len(names)
    for i, contender in enumerate(names):
        colour = COLOURS.get(contender, OTHERS[i % len(OTHERS)])
        for place, rounds in enumerate(settings.values()):
            middle = medians(rounds[contender])[measure]
            low, high = spread(rounds[contender], measure)
            at = place + (i - (len(names) - 1) / 2) * width
            axes.bar(at, middle, width * 0.92, color=colour, label=contender if place == 0 else "")
            axes.errorbar(at, middle, [[middle - low], [high - middle]], color="black", capsize=3)
            told = f"{middle:,.3g}" if middle < 100 else f"{middle:,.0f}"
            axes.annotate(told, (at, high), (0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(settings)), list(settings))
    axes.set_ylabel(label)
    axes.margins(y=0.15)
    axes.legend(frameon=False)
    _save(figure, name)


def _save(figure: Any, name: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    plt.close(figure)
