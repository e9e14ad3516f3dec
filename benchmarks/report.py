"""Puts the tables of results/*.json into README.md, between its two markers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.harness import HERE, RESULTS, Measured, medians, paired_ratio, spread
from benchmarks.tables import busy, faster, ranged, table, where
from benchmarks.ways import ADAPTER, BARE, OURS, PLAIN

BEGIN, END = "<!-- results: written by `make bench` -->", "<!-- end of results -->"
STAGES = ("rollout", "reward", "teachers", "advantages", "update_student", "sync", "clear")
SYNC = ("sync, 1 thread", "sync, 2 threads")

Rounds = Mapping[str, Sequence[Measured]]


def rollout(found: Mapping[str, Any]) -> str:
    """Tokens per second of each contender, and ours over the best of the others."""
    rows = []
    for title, rounds in found["raced"].items():
        ours = next(iter(rounds))
        for name in rounds:
            low, high = spread(rounds[name], "tokens_per_second")
            mid = medians(rounds[name])
            ratio = paired_ratio(rounds[ours], rounds[name], "tokens_per_second")
            told = "" if name == ours else faster(ratio)
            speed = f"{mid['tokens_per_second']:,.0f} ({low:,.0f} to {high:,.0f})"
            times = f"{mid['seconds']:.2f} ({mid['cpu_seconds']:.2f})"
            rows.append([title, name, speed, times, f"{mid['tokens']:.0f}", told])
    head = ["setting", "contender", "tokens/s", "s (of processor)", "tokens", "practicum is faster by"]
    return "\n\n".join([f"### Rollout, {where(found)}", table(head, rows), *busy(found["raced"])])


def beside_trl(found: Mapping[str, Any], heading: str) -> str:
    """Seconds per step of both, and the ratio."""
    rows = []
    for title, rounds in found["raced"].items():
        ratio = paired_ratio(rounds["trl"], rounds["practicum"], "seconds")
        for name in rounds:
            mid, (low, high) = medians(rounds[name]), spread(rounds[name], "seconds")
            told = faster(ratio) if name == "trl" else ""
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
    return "\n\n".join([f"### {heading}, {where(found)}", table(head, rows), *busy(found["raced"])])


def profile(found: Mapping[str, Any]) -> str:
    """The step by stage and by kind of operator."""
    step = found["step"]
    kinds, rate = found["kinds"], step["best_gflop_per_second"]
    stages = [
        [name, f"{step[name]:.3f}", f"{step[name] / step['seconds']:.1%}"] for name in STAGES if name in step
    ]
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


def sharing_step(found: Mapping[str, Any]) -> str:
    """Seconds of the step, rollout and update with and without sharing, and what was shared."""
    rows, parts = [], ("seconds", "rollout", "update_student")
    for title, raced in found["raced"].items():
        ours, _ = raced
        for name, rounds in raced.items():
            mid, seconds = medians(rounds), [ranged(rounds, part) for part in parts]
            ratios = [paired_ratio(rounds, raced[ours], part) for part in parts]
            shares = [f"{mid[key]:.0%}" for key in ("shared_decode", "shared_learn")]
            told = [""] * 3 if name == ours else list(map(faster, ratios))
            rows.append([title, name, *seconds, *shares, f"{mid['tokens']:.0f}", *told])
    head = ["setting", "shares", "s/step", "rollout", "update", "`shared/decode`", "`shared/learn`"]
    head += ["tokens sampled", "practicum is faster by", "rollout", "update"]
    title = f"### GRPO step with and without shared beginnings, {where(found)}"
    return "\n\n".join([title, table(head, rows), *busy(found["raced"])])


def distill_step(found: Mapping[str, Any]) -> str:
    """Seconds per step of both and of their parts, the ratio, and that both learn."""
    rows = []
    for title, rounds in found["raced"].items():
        ratio = paired_ratio(rounds["trl"], rounds["practicum"], "seconds")
        for name, measured in rounds.items():
            mid = medians(measured)
            told = faster(ratio) if name == "trl" else ""
            rest = mid["seconds"] - mid["rollout"] - mid["teachers"]
            split = [f"{s:.2f}" for s in (mid["rollout"], mid["teachers"], rest)]
            kl = f"{mid['checked_loss']:.3f} → {measured[-1]['learnt_loss']:.3f}"
            cpu, tokens = f"{mid['cpu_seconds']:.2f}", f"{mid['tokens']:.0f}"
            memory = f"{mid['peak_mib']:,.0f}" if "peak_mib" in mid else "–"
            rows.append([title, name, ranged(measured, "seconds"), cpu, *split, tokens, memory, kl, told])
    ours, theirs = (found["raced"]["1 thread"][name][0] for name in ("practicum", "trl"))
    head = [
        *("setting", "contender", "s/step", "of processor", "rollout", "teacher", "update and the rest"),
        *("tokens sampled", "peak MiB", "loss of the same rows", "practicum is faster by"),
    ]
    same = (
        f"On the same rows and weights, practicum and TRL compute a loss of {ours['checked_loss']:.5f} and "
        f"{theirs['checked_loss']:.5f}, and a gradient norm of {ours['checked_gradient']:.4f} and "
        f"{theirs['checked_gradient']:.4f}."
    )
    return "\n\n".join(
        [f"### Distillation step, {where(found)}", table(head, rows), same, *busy(found["raced"])]
    )


def sessions(found: Mapping[str, Any]) -> str:
    """Sessions per second, the share of the time in which the engine computed, and turns over HTTP."""
    raced = found["raced"]["1 thread"]
    ours, instant, *_ = raced
    rows = []
    for name, measured in raced.items():
        mid = medians(measured)
        ratio = paired_ratio(measured, raced[instant], "sessions_per_second")
        speed = [ranged(measured, "sessions_per_second", ".1f"), f"{mid['tokens_per_second']:,.0f}"]
        spent = [f"{mid['seconds']:.2f}", f"{mid['cpu_seconds']:.2f}", f"{mid['busy']:.1%}"]
        told = "" if name == instant else _times(ratio, ".2f")
        keys = ("p50", "p99", "client_seconds")
        http = [ranged(measured, key) for key in keys] if mid.get("p99") else [""] * 3
        rows.append([name, *speed, *spent, f"{1e3 * mid['longest_pause']:.0f}", *http, told])
    mid, idle = medians(raced[ours]), max(medians(m).get("idle_kib", 0) for m in raced.values())
    head = [
        *("sessions", "sessions/s", "tokens/s", "s", "of processor", "engine at work"),
        *("longest pause, ms", "p50 of a turn, s", "p99, s", "client's processor, s", f"÷ {instant}"),
    ]
    text = f"Each round samples {mid['tokens']:,.0f} tokens and reads {mid['read_tokens']:,.0f}. "
    text += f"An idle session takes {idle:.1f} KiB."
    return "\n\n".join([f"### Sessions, {where(found)}", table(head, rows), text, *busy(found["raced"])])


def data_plane(found: Mapping[str, Any]) -> str:
    """Milliseconds of put and get by route and size, and the main ratios."""
    rows, keys = [], ("put", "get", "moved", "whole")
    for title, raced in found["raced"].items():
        for name, rounds in raced.items():
            mid = medians(rounds)
            parts = [f"{1e3 * mid[key]:.1f}" if key in mid else "" for key in keys]
            told = "" if name == OURS else _times(paired_ratio(rounds, raced[OURS], "whole"))
            rows.append([title, name, *parts, told])
    judged: Rounds = found["raced"][found["judged"]]
    pairs = ((PLAIN, OURS), (PLAIN, ADAPTER), (OURS, BARE))
    lines = [f"{a} ÷ {b}: {_times(paired_ratio(judged[a], judged[b], 'moved'))}" for a, b in pairs]
    sizes = ", ".join(f"{title}: {size / 1e6:.1f} MB" for title, size in found["bytes"].items())
    head = ["size", "way", "put, ms", "get, ms", "put + get", "end to end", f"÷ {OURS}, end to end"]
    text = f"{found['judged']}, put + get: {'; '.join(lines)}. Sizes: {sizes}."
    return "\n\n".join([f"### Data plane, {where(found)}", table(head, rows), text])


def ray_step(found: Mapping[str, Any]) -> str:
    """Seconds of a step in both runtimes, by stage, and the start."""
    rows, stages = [], []
    for title, raced in found["raced"].items():
        ratio, low, high = paired_ratio(raced["ray"], raced["local"], "seconds")
        for name, rounds in raced.items():
            more = f"{ratio - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})" if name == "ray" else ""
            start = f"{medians(rounds)['start']:.1f}"
            rows.append([title, name, ranged(rounds, "seconds", ".3f"), start, more])
        local, ray = medians(raced["local"]), medians(raced["ray"])
        times = [f"{1e3 * local[s]:.0f} → {1e3 * ray[s]:.0f}" if s in local else "" for s in STAGES]
        stages.append([title, *times])
    head = ["setting", "runtime", "s/step", "s to start", "a step on Ray takes longer by"]
    by_stage = table(["ms of a stage, local → ray", *STAGES], stages)
    alone = {title: {"local": raced["local"]} for title, raced in found["raced"].items()}
    title = f"### The demo's step on Ray, {where(found)}"
    return "\n\n".join([title, table(head, rows), by_stage, *busy(alone)])


def async_step(found: Mapping[str, Any]) -> str:
    """Seconds per step with each lag and kind of work, and when each reached the common score."""
    rows = []
    for kind, raced in found["raced"].items():
        best = min(SYNC, key=lambda name: medians(raced[name])["seconds"])
        for name, rounds in raced.items():
            mid = medians(rounds)
            ratio = "" if name in SYNC else faster(paired_ratio(raced[best], rounds, "seconds"))
            waited = "" if name in SYNC else f"{mid['waited']:.2f}"
            rows.append([kind, name, ranged(rounds, "seconds"), f"{mid['cpu_seconds']:.2f}", waited, ratio])
    head = ["work", "way", "s/step", "of processor", "learner waited", "faster than the best synchronous way"]
    parts = [f"### Rollouts ahead of the learner, {where(found)}", table(head, rows)]
    if scores := found["scores"]:
        reached = min(max(row["score"] for row in rows) for rows in scores.values())
        lines = []
        for name, by_step in scores.items():
            first = next(row for row in by_step if row["score"] >= reached)
            ends = [f"{by_step[0]['score']:.2f}", f"{by_step[-1]['score']:.2f}"]
            lines.append([name, *ends, f"{first['step']:.0f}", f"{first['seconds']:.0f}"])
        head = ["way", "first greedy score", "last", f"steps until {reached:.2f}", "seconds until then"]
        parts.append(table(head, lines))
    return "\n\n".join(parts)


def _times(ratio: tuple[float, float, float], style: str = ".1f") -> str:
    middle, low, high = ratio
    return f"{middle:{style}} ({low:{style}} to {high:{style}})"


SECTIONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "rollout": rollout,
    "grpo_step": partial(beside_trl, heading="GRPO step"),
    "words_step": partial(beside_trl, heading="GRPO step on words"),
    "hybrid_step": partial(beside_trl, heading="GRPO step of a hybrid model"),
    "sharing_step": sharing_step,
    "profile": profile,
    "distill_step": distill_step,
    "sessions": sessions,
    "data_plane": data_plane,
    "ray_step": ray_step,
    "async_step": async_step,
}
"""By file in results/, in the report's order."""


def main() -> None:
    """Write the section of README.md anew from what is in results/."""
    sections = []
    for name, build in SECTIONS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            title, _, text = build(json.loads(path.read_text())).partition("\n")
            plot = (
                f"\n\n![{title[4:].partition(',')[0]}](results/{name}.png)"
                if path.with_suffix(".png").exists()
                else ""
            )
            sections.append(f"{title}{plot}\n{text}")
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
