"""The report's section on forecasts, from results/forecast.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import table, verdict, where


def forecast(found: Mapping[str, Any]) -> str:
    """Forecast and measured seconds of each shape and contender; the stages that take longest beside."""
    rows = []
    for shape, contenders in found["shapes"].items():
        (base, first), *others = contenders.items()
        rows.append([shape, base, "", f"{first['measured']:.2f}", "", _stages(first)])
        for name, one in others:
            off = one["forecast"] / one["measured"] - 1
            told = f"{off:+.0%}" + verdict(abs(off) <= found["goal"], f"±{found['goal']:.0%}")
            seconds = [f"{one['forecast']:.2f}", f"{one['measured']:.2f}", told]
            rows.append([shape, name, *seconds, _stages(one)])
    head = ["shape", "step", "forecast, s", "measured, s", "off by", "of it: forecast / measured, s"]
    text = "The forecast (`practicum plan --from`) knows the first line of each shape alone."
    return "\n\n".join([f"### Forecasts, {where(found)}", table(head, rows), text])


def _stages(one: Mapping[str, Any], count: int = 3) -> str:
    largest = sorted(one["stages"].items(), key=lambda item: -item[1]["measured"])[:count]
    return ", ".join(f"{name} {both['forecast']:.2f} / {both['measured']:.2f}" for name, both in largest)
