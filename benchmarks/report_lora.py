"""The report's sections on adapters, each from one file of results/. Their tables are in docs/lora.md too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import medians, paired_ratio
from benchmarks.tables import busy, faster, ranged, table, verdict, where

MEMORY_GOAL, TIME_GOAL = 1.2, 1.15
"""Three adapter teachers: all weights of their run in parts of one model's, and their seconds in parts of one
whole teacher's on the same rows."""


def lora_step(found: Mapping[str, Any]) -> str:
    """Steps and memory, with the machine."""
    return f"### Adapters, {where(found)}\n\n{costs(found)}"


def vllm_lora(found: Mapping[str, Any]) -> str:
    """Syncs, with the machine."""
    return f"### Sync of an adapter, {where(found)}\n\n{syncs(found)}"


def costs(found: Mapping[str, Any]) -> str:
    """Step and memory by rank, beside TRL, and of three teachers: the parts that were measured."""
    parts: list[str] = []
    if "ranks" in found:
        parts += [_ranks(found["ranks"]), *busy({"1 thread": next(iter(found["ranks"].values()))})]
    if "trl" in found:
        parts += [*_peers(found["trl"]), *busy({"1 thread": found["trl"]})]
    if "teachers" in found:
        parts += [_teachers(found), *busy({"1 thread": found["teachers"]})]
    return "\n\n".join(parts)


def _ranks(sizes: Mapping[str, Any]) -> str:
    rows = []
    for rounds in sizes.values():
        whole, *_ = rounds.values()
        most = medians(whole)
        for name, measured in rounds.items():
            mid = medians(measured)
            step = "" if measured is whole else f" · {paired_ratio(measured, whole, 'seconds')[0]:.2f}"
            stages = [f"{mid[stage]:.2f}" for stage in ("rollout", "update_student")]
            held, peak = (f"{mid[k]:,.0f} · {mid[k] / most[k]:.2f}" for k in ("held_mb", "peak_mb"))
            rows.append([name, f"{ranged(measured, 'seconds')}{step}", *stages, held, peak])
    head = ["model, trained", "s/step · ÷ all weights", "rollout", "update"]
    return table(
        [*head, "weights, gradients, moments, MiB · ÷ all weights", "peak of the process, MiB · ÷"], rows
    )


def _peers(raced: Mapping[str, Any]) -> list[str]:
    """Each of ours, and its ratio to TRL's; the goal is the ratio with all weights."""
    pairs = list(zip(*[iter(raced.items())] * 2, strict=True))
    ratios = {ours: paired_ratio(theirs, mine, "seconds") for (ours, mine), (_, theirs) in pairs}
    adapter, whole = ratios.values()
    rows = []
    for name, measured in raced.items():
        ahead = ratios.get(name)
        cell = "" if ahead is None else faster(ahead, None)
        if ahead is adapter:
            cell += verdict(adapter[0] >= whole[0], f"{whole[0]:.1f}× as with all weights,")
        rows.append([name, ranged(measured, "seconds"), f"{medians(measured)['peak_mb']:,.0f}", cell])
    return [table(["GRPO, 4M", "s/step", "peak MiB", "practicum is faster by"], rows)]


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


def syncs(found: Mapping[str, Any]) -> str:
    """Milliseconds of a sync, what is sent, and a rollout after it."""
    rows = [
        [name, f"{mid['mb']:,.1f}", f"{1000 * mid['seconds']:,.1f}", f"{mid['rollout']:.2f}"]
        for rounds in found["raced"].values()
        for name, measured in rounds.items()
        for mid in (medians(measured),)
    ]
    return table(["model, engine and what is sent", "MiB", "sync, ms", "rollout after it, s"], rows)
