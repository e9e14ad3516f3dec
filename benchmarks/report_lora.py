"""The report's sections on adapters, each from one file of results/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import medians, paired_ratio
from benchmarks.tables import busy, faster, ranged, table, verdict, where

PEER_GOAL = 3.5
MEMORY_GOAL, TIME_GOAL = 1.2, 1.15
"""Three adapter teachers: all weights of their run in parts of one model's, and their seconds in parts of one
whole teacher's on the same rows."""


def lora_step(found: Mapping[str, Any]) -> str:
    """Step and memory by rank, beside TRL, and of three teachers."""
    rows = []
    for rounds in found["ranks"].values():
        whole = next(iter(rounds))
        for name, measured in rounds.items():
            mid, most = medians(measured), medians(rounds[whole])
            update = f"{mid['update_student']:.2f}"
            memory = f"{mid['peak_mb']:,.0f} ({mid['peak_mb'] / most['peak_mb']:.2f})"
            rows.append([name, ranged(measured, "seconds"), update, memory])
    parts = [f"### Adapters, {where(found)}"]
    parts.append(table(["model, trained", "s/step", "update", "peak MiB (÷ all weights)"], rows))
    ours, theirs = found["trl"].values()
    ratio = paired_ratio(theirs, ours, "seconds")
    peers = [
        [name, ranged(measured, "seconds"), f"{medians(measured)['peak_mb']:,.0f}"]
        for name, measured in found["trl"].items()
    ]
    peers[1].append(faster(ratio, PEER_GOAL))
    peers[0].append("")
    parts.append(table(["GRPO of an adapter", "s/step", "peak MiB", "practicum is faster by"], peers))
    parts.append(_teachers(found))
    return "\n\n".join([*parts, *busy({"1 thread": found["teachers"]})])


def _teachers(found: Mapping[str, Any]) -> str:
    raced = found["teachers"]
    rows = []
    for name, measured in raced.items():
        mid = medians(measured)
        memory = [f"{mid['weights_mb']:,.1f}", f"{mid['weights_mb'] / mid['model_mb']:.2f}"]
        rows.append([name, ranged(measured, "teachers"), *memory, f"{mid['peak_mb']:,.0f}"])
    middle, least, most = paired_ratio(raced["three adapters"], raced["one whole"], "teachers")
    adapters = medians(raced["three adapters"])
    memory = adapters["weights_mb"] / adapters["model_mb"]
    in_time = verdict(middle <= TIME_GOAL, f"at most {TIME_GOAL:g}")
    in_memory = verdict(memory < MEMORY_GOAL, f"under {MEMORY_GOAL:g}")
    told = (
        f"Three adapters take {middle:.2f} ({least:.2f} to {most:.2f}) of one whole teacher's time on the "
        f"same rows{in_time}; with the student's adapter and their base they are {memory:.2f} of one "
        f"model{in_memory}."
    )
    head = [f"teachers of an adapter, {found['settings']['teachers_on']}", "scoring, s/step"]
    head += ["weights of student and teachers, MiB", "÷ one model", "peak MiB"]
    return "\n\n".join([table(head, rows), told])


def vllm_lora(found: Mapping[str, Any]) -> str:
    """Milliseconds of a sync, what is sent, and a rollout after it."""
    rows = [
        [name, f"{mid['mb']:,.1f}", f"{1000 * mid['seconds']:,.1f}", f"{mid['rollout']:.2f}"]
        for rounds in found["raced"].values()
        for name, measured in rounds.items()
        for mid in (medians(measured),)
    ]
    head = ["model, engine and what is sent", "MiB", "sync, ms", "rollout after it, s"]
    return "\n\n".join([f"### Sync of an adapter, {where(found)}", table(head, rows)])
