"""The report's sections on teachers and distillation, each from one file of results/."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import medians, paired_ratio
from benchmarks.tables import busy, faster, ranged, table, verdict, where

STEP_GOAL = 4.0
FACULTY_GOAL = 1.05
"""Three teachers' time for the same rows in parts of one's: 1, and 5 % for noise."""


def distill_step(found: Mapping[str, Any]) -> str:
    """Seconds per step of both and of their parts, the ratio, and that both learn."""
    parts = [f"### Distillation step, {where(found)}", "![distillation step](results/distill_step.png)"]
    rows = []
    for title, rounds in found["raced"].items():
        ratio = paired_ratio(rounds["trl"], rounds["practicum"], "seconds")
        for name, measured in rounds.items():
            mid = medians(measured)
            told = faster(ratio, STEP_GOAL) if name == "trl" else ""
            rest = mid["seconds"] - mid["rollout"] - mid["teachers"]
            split = [f"{s:.2f}" for s in (mid["rollout"], mid["teachers"], rest)]
            kl = f"{mid['checked_loss']:.3f} → {measured[-1]['learnt_loss']:.3f}"
            cpu, tokens = f"{mid['cpu_seconds']:.2f}", f"{mid['tokens']:.0f}"
            rows.append([title, name, ranged(measured, "seconds"), cpu, *split, tokens, kl, told])
    ours, theirs = (found["raced"]["1 thread"][name][0] for name in ("practicum", "trl"))
    head = [
        *("setting", "contender", "s/step", "of processor", "rollout", "teacher", "update and the rest"),
        *("tokens sampled", "loss of the same rows", "practicum is faster by"),
    ]
    same = (
        f"Of the same rows and weights, practicum and TRL compute a loss of {ours['checked_loss']:.5f} and "
        f"{theirs['checked_loss']:.5f}, and a gradient of norm {ours['checked_gradient']:.4f} and "
        f"{theirs['checked_gradient']:.4f}."
    )
    return "\n\n".join([*parts, table(head, rows), same, *busy(found["raced"])])


def teacher_overlap(found: Mapping[str, Any]) -> str:
    """What scoring costs beside the rollout, and how much of it was hidden."""
    raced, chosen = found["raced"], found["nearest_to_half"]
    rows = []
    for name, measured in raced.items():
        mid = medians(measured)
        hidden = "" if "hidden" not in mid else f"{mid['hidden']:.0%}"
        if name == chosen:
            hidden += verdict(mid["hidden"] >= found["goal"], f"{found['goal']:.0%}")
        scored = [f"{mid['scoring']:.2f}", f"{mid['ratio']:.2f}", hidden]
        rows.append([name, ranged(measured, "seconds"), f"{mid['sampling']:.2f}", *scored])
    head = ["teacher", "s/step", "sampling", "scoring", "scoring ÷ sampling", "hidden behind the rollout"]
    warnings = busy({"1 thread": raced})
    return "\n\n".join([f"### Streamed scoring, {where(found)}", table(head, rows), *warnings])


def teacher_sleep(found: Mapping[str, Any]) -> str:
    """The parts of a cycle in milliseconds, and three teachers beside one."""
    parts = ("student_sleeps", "teacher_wakes", "teacher_sleeps", "student_wakes")
    rows = []
    for name, measured in found["cycles"].items():
        mid = medians(measured)
        after, _, _ = paired_ratio(measured, [{"after": m["before"]} for m in measured], "after")
        times = [f"{1e3 * mid[part]:.1f}" for part in (*parts, "cycle")]
        rows.append([name, f"{mid['bytes'] / 1e6:.0f}", *times, f"{after:.2f}"])
    head = [
        *("teacher, its weights", "MB", "student sleeps, ms", "teacher wakes", "teacher sleeps"),
        *("student wakes", "the whole cycle", "rollout after ÷ before"),
    ]
    title = f"### Sleeping teachers, {where(found)}"
    return "\n\n".join([title, table(head, rows), *_faculties(found["faculties"])])


def _faculties(found: Mapping[str, Any]) -> list[str]:
    raced = found["1 thread"]
    ratio, low, high = paired_ratio(raced["three teachers"], raced["one teacher"], "teachers")
    rows = []
    for name, measured in raced.items():
        mid = medians(measured)
        told = f"{ratio:.2f} ({low:.2f} to {high:.2f})" + verdict(ratio <= FACULTY_GOAL, f"{FACULTY_GOAL:g}")
        tokens = f"{mid['tokens']:.0f}"
        rows.append([name, ranged(measured, "teachers"), tokens, told if name == "three teachers" else ""])
    head = ["colocated", "s in the teachers' stage", "tokens scored", "÷ one teacher"]
    return [table(head, rows), *busy(found)]


def distill_memory(found: Mapping[str, Any]) -> str:
    """Peak memory of the losses in parts of one log-softmax of all tokens."""
    sizes, whole = found["sizes"], found["computed_bytes"]
    rows = []
    for name, (measured,) in found["raced"].items():
        share = measured["bytes"] / whole
        is_loss = not name.startswith("log-softmax")
        told = verdict(share < found["goal"], f"{found['goal']:.0%}") if is_loss else ""
        gigabytes, seconds = f"{measured['bytes'] / 1e9:.2f}", f"{measured['cpu_seconds']:.0f}"
        rows.append([name, gigabytes, f"{share:.1%}{told}", seconds])
    text = (
        f"{sizes['tokens']:,} tokens × {sizes['vocab']:,} vocabulary in float32 are {whole / 1e9:.2f} GB. "
        "Peak memory on top of weights and inputs, forward and backward:"
    )
    head = ["loss", "GB", "of the log-softmax", "s of processor"]
    return "\n\n".join([f"### Memory of the losses, {where(found)}", text, table(head, rows)])
