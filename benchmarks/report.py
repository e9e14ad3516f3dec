"""Puts the tables of results/*.json into README.md, between its two markers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks import report_async as ahead
from benchmarks import report_engines as engines
from benchmarks import report_forecast as forecasts
from benchmarks import report_lora as lora
from benchmarks import report_scale as scale
from benchmarks import report_sessions as sessions
from benchmarks import report_teachers as teachers
from benchmarks import report_view as view
from benchmarks.harness import HERE, RESULTS, medians, paired_ratio, spread
from benchmarks.tables import busy, faster, table, verdict, where

BEGIN, END = "<!-- results: written by `make bench` -->", "<!-- end of results -->"
GOAL = 5.0
STAGES = ("rollout", "reward", "advantages", "update_student", "sync", "clear")


def rollout(found: Mapping[str, Any]) -> str:
    """Tokens per second of each contender, and ours over the best of the others."""
    parts = [f"### Rollout, {where(found)}", "![rollout](results/rollout.png)"]
    rows = []
    for title, rounds in found["raced"].items():
        ours, *others = rounds
        best = max(others, key=lambda name: medians(rounds[name])["tokens_per_second"])
        for name in rounds:
            low, high = spread(rounds[name], "tokens_per_second")
            mid = medians(rounds[name])
            ratio = paired_ratio(rounds[ours], rounds[name], "tokens_per_second")
            told = "" if name == ours else faster(ratio, GOAL if name == best else None)
            speed = f"{mid['tokens_per_second']:,.0f} ({low:,.0f} to {high:,.0f})"
            times = f"{mid['seconds']:.2f} ({mid['cpu_seconds']:.2f})"
            rows.append([title, name, speed, times, f"{mid['tokens']:.0f}", told])
    head = ["setting", "contender", "tokens/s", "s (of processor)", "tokens", "practicum is faster by"]
    return "\n\n".join([*parts, table(head, rows), *busy(found["raced"])])


def grpo_step(found: Mapping[str, Any]) -> str:
    """Seconds per step of both, and the ratio."""
    return "\n\n".join(
        [f"### GRPO step, {where(found)}", "![GRPO step](results/grpo_step.png)", *_beside_trl(found)]
    )


def words_step(found: Mapping[str, Any]) -> str:
    """The same in the other setting."""
    return "\n\n".join([f"### GRPO step on words, {where(found)}", *_beside_trl(found)])


def _beside_trl(found: Mapping[str, Any]) -> list[str]:
    """A table of steps, and warnings."""
    rows = []
    for title, rounds in found["raced"].items():
        ratio = paired_ratio(rounds["trl"], rounds["practicum"], "seconds")
        for name in rounds:
            mid, (low, high) = medians(rounds[name]), spread(rounds[name], "seconds")
            told = faster(ratio, GOAL) if name == "trl" else ""
            seconds = f"{mid['seconds']:.2f} ({low:.2f} to {high:.2f})"
            cpu, tokens = f"{mid['cpu_seconds']:.2f}", f"{mid['tokens']:.0f}"
            rows.append([title, name, seconds, cpu, tokens, f"{mid['mean_reward']:.2f}", told])
    head = [
        "setting",
        "contender",
        "s/step",
        "of processor",
        "tokens sampled",
        "reward",
        "practicum is faster by",
    ]
    return [table(head, rows), *busy(found["raced"])]


def invariance_cost(found: Mapping[str, Any]) -> str:
    """Processor time of rollouts with the rules and without, and what they add."""
    (ruled, bare), goal = found["raced"].values(), found["goal"]
    rows = []
    for case in found["cases"]:
        ratio, low, high = (one - 1 for one in paired_ratio(ruled, bare, case))
        added = f"{ratio:+.1%} ({low:+.1%} to {high:+.1%}){verdict(ratio < goal, f'{goal:.0%}')}"
        rows.append([case, f"{medians(ruled)[case]:.3f}", f"{medians(bare)[case]:.3f}", added])
    head = ["rollout", "s of processor, with the rules", "without", "they add"]
    return "\n\n".join([f"### Cost of the same bits in any batch, {where(found)}", table(head, rows)])


def growth(found: Mapping[str, Any]) -> str:
    """Seconds by stage for each size, and the exponents."""
    parts = [f"### Growth, {where(found)}", "![growth](results/growth.png)"]
    rows = []
    for series, points in found["medians"].items():
        first = points[0][1]["seconds"] / points[0][0]
        for size, mid in points:
            per_size = mid["seconds"] / size / first
            stages = [f"{mid[name]:.2f}" for name in ("rollout", "update_student")]
            label = f"{series} ×{size:g}"
            cpu, tokens = f"{mid['cpu_seconds']:.2f}", f"{mid['tokens']:.0f}"
            rows.append([label, f"{mid['seconds']:.2f}", cpu, *stages, tokens, f"{per_size:.2f}"])
    head = ["size", "s/step", "of processor", "rollout", "update", "tokens sampled", "time ÷ linear"]
    told = []
    for series, found_p in found["exponents"].items():
        step, rolled, updated = (found_p[n] for n in ("seconds", "rollout", "update_student"))
        told.append(
            f"Exponent of growth with the {series} (1 is linear): step {step:.2f}, "
            f"rollout {rolled:.2f}, update {updated:.2f}.  "
        )
    return "\n\n".join([*parts, table(head, rows), "\n".join(told)])


def profile(found: Mapping[str, Any]) -> str:
    """The step by stage and by kind of operator."""
    step = found["step"]
    kinds, rate = found["kinds"], step["best_gflop_per_second"]
    stages = [[name, f"{step[name]:.3f}", f"{step[name] / step['seconds']:.1%}"] for name in STAGES]
    whole = sum(kinds.values())
    split = sorted(kinds.items(), key=lambda item: -item[1])
    operators = [[name, f"{seconds:.3f}", f"{seconds / whole:.1%}"] for name, seconds in split]
    return "\n\n".join(
        [
            f"### Where practicum's step spends its time, {where(found)}",
            f"One step under torch.profiler (which itself costs time): {step['seconds']:.2f} s, "
            f"{found['calls']:,} operator calls. Its matrix products are {found['gflop']:.0f} GFLOP; "
            f"at this thread's best rate for such products, {rate:.0f} GFLOP/s, they alone would take "
            f"{found['gflop'] / rate:.2f} s.",
            table(["stage", "s", "share of the step"], stages),
            table(["operators (their own time, all threads)", "s", "share"], operators),
        ]
    )


SECTIONS = (
    *(rollout, invariance_cost, engines.vllm_engine, grpo_step, words_step, growth, profile),
    *(teachers.distill_step, teachers.teacher_overlap, teachers.teacher_sleep, teachers.distill_memory),
    *(lora.lora_step, lora.vllm_lora),
    *(sessions.sessions, sessions.padding_cost, sessions.balance),
    *(scale.data_plane, scale.routed_step, scale.store_keys, scale.ray_step, scale.controller_memory),
    *(scale.attention_memory, scale.learner_memory, scale.rank_memory),
    forecasts.forecast,
    *(ahead.async_step, ahead.async_evidence),
    *(view.record_cost, view.view_page),
)
"""In the report's order; each is named as its file in results/."""


def main() -> None:
    """Write the section of README.md anew from what is in results/."""
    sections = []
    for build in SECTIONS:
        path = RESULTS / f"{build.__name__}.json"
        if path.exists():
            sections.append(build(json.loads(path.read_text())))
    text = "\n\n".join(sections)
    readme = HERE / "README.md"
    readme.write_text(insert(readme.read_text(), text))
    print(text)


def insert(document: str, text: str) -> str:
    """The document with `text` in place of what is between the markers."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has lost its markers: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


if __name__ == "__main__":
    main()
