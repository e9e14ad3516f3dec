"""The report's section on the two engines. Its tables stand in docs/engines.md too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import RESULTS, Measured, medians, paired_ratio
from benchmarks.tables import busy, ranged, table, where

TORCH, VLLM = "torch engine", "vLLM"
WORK = {"equal": "rollout, equal lengths", "ragged": "rollout, ragged lengths"}
Rounds = Mapping[str, Sequence[Measured]]


def vllm_engine(found: Mapping[str, Any]) -> str:
    """Everything of the run."""
    parts = ["### The torch engine beside vLLM", speeds(found), agreed(found)]
    return "\n\n".join([*parts, weights(found), rests(found), neighbours(found)])


def measured() -> dict[str, Any]:
    """The results of the last run."""
    return json.loads((RESULTS / "vllm_engine.json").read_text())


def speeds(found: Mapping[str, Any]) -> str:
    """Tokens per second by model, work and threads, with warnings where the machine was busy."""
    rows = []
    for title, raced in found["raced"].items():
        threads, size, case = title.split(", ", 2)
        ratio, low, high = paired_ratio(raced[TORCH], raced[VLLM], "tokens_per_second")
        both = [ranged(raced[kind], "tokens_per_second", ",.0f") for kind in (TORCH, VLLM)]
        rows.append([size, WORK.get(case, case), threads, *both, f"{ratio:.2f} ({low:.2f} to {high:.2f})"])
    head = ["parameters", "work", "threads", *(f"{kind}, tokens/s" for kind in (TORCH, VLLM))]
    rounds = found["settings"]["rounds"]
    told = f"{where(found)}; medians of {rounds} round{'s' * (rounds > 1)}, least and greatest in brackets."
    return "\n\n".join([table([*head, f"{TORCH} ÷ {VLLM}"], rows), told, *busy(found["raced"])])


def agreed(found: Mapping[str, Any]) -> str:
    """That both did the same work."""
    told = [
        f"{size}: {one['agree']:.2%} of {one['tokens']:,.0f} greedy tokens are the same, and scored logprobs "
        f"differ by at most {one['largest_difference']:.1e}."
        for size, one in found["same"].items()
    ]
    return "  \n".join(told)


def weights(found: Mapping[str, Any]) -> str:
    """Seconds of new weights by their size."""
    rows = []
    for title, raced in sorted(found["synced"].items(), key=lambda item: _size(item[1])):
        threads, size, _ = title.split(", ", 2)
        floor = medians(raced[TORCH])["memcpy"]
        both = [_ms(raced[kind], "seconds") for kind in (TORCH, VLLM)]
        times = [{"ratio": one["seconds"] / one["memcpy"]} for one in raced[VLLM]]
        rows.append(
            [
                size,
                f"{_size(raced) / 1e6:,.0f}",
                threads,
                f"{1e3 * floor:.1f}",
                *both,
                ranged(times, "ratio", ".1f"),
            ]
        )
    head = ["parameters", "MB", "threads", "one memcpy, ms", *(f"{kind}, ms" for kind in (TORCH, VLLM))]
    return table([*head, f"{VLLM} ÷ memcpy"], rows)


def rests(found: Mapping[str, Any]) -> str:
    """Seconds of sleep and wake, and what the process holds."""
    rows = []
    for kind, rounds in found["rested"].items():
        seconds = [ranged(rounds, act, ".3f") for act in ("sleep", "wake")]
        mid = medians(rounds)
        held = [f"{mid[name]:,.0f}" for name in ("mb_before", "mb_asleep", "mb_after")]
        rows.append([kind, *seconds, *held])
    head = ["engine", "s to fall asleep", "s to wake, with its weights"]
    return table([*head, "process, MB, before", "asleep", "after"], rows)


def neighbours(found: Mapping[str, Any]) -> str:
    """Rollouts of one engine, and of two at once."""
    rows = []
    for name, rounds in found["neighbours"].items():
        both = [ranged(rounds, key, ",.0f") for key in ("alone", "both")]
        rows.append([name, *both, ranged(rounds, "gain", ".2f")])
    head = ["threads of each engine", "one engine, tokens/s", "two at once, tokens/s of both"]
    return table([*head, "two ÷ one"], rows)


def _size(raced: Rounds) -> float:
    return raced[VLLM][0]["bytes"]


def _ms(rounds: Sequence[Measured], name: str) -> str:
    return ranged([{name: 1e3 * one[name]} for one in rounds], name, ".1f")
