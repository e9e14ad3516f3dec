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


def growth(series: Mapping[str, Sequence[tuple[float, Mapping[str, float]]]], name: str) -> None:
    """Time per step over a growing size, by stage, beside the line of linear growth."""
    figure, all_axes = plt.subplots(1, len(series), figsize=(9, 3.6))
    for axes, (title, points) in zip(all_axes, series.items(), strict=True):
        sizes = [size for size, _ in points]
        whole = [found["seconds"] for _, found in points]
        axes.loglog(sizes, whole, "o-", color=COLOURS["practicum"], label="step")
        for stage in ("rollout", "update_student"):
            axes.loglog(sizes, [found[stage] for _, found in points], "o:", label=stage)
        linear = [whole[0] * size / sizes[0] for size in sizes]
        axes.loglog(sizes, linear, "--", color="#8a8f98", label="linear")
        axes.set_xticks(sizes, [f"×{size:g}" for size in sizes])
        axes.minorticks_off()
        axes.set_title(title)
        axes.set_ylabel("seconds per step")
        axes.legend(frameon=False)
    _save(figure, name)


def _save(figure: Any, name: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(RESULTS / f"{name}.png", dpi=110)
    plt.close(figure)
