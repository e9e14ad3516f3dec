"""The report's sections on scale-out: the data plane, steps on Ray, and the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import Measured, medians, paired_ratio
from benchmarks.tables import busy, ranged, table, verdict, where
from benchmarks.ways import ADAPTER, BARE, LEARNER, OURS, PLAIN, THROUGH

Rounds = Mapping[str, Sequence[Measured]]
TIMED = ("rollout", "reward", "teachers", "advantages", "update_student", "sync", "clear")


def data_plane(found: Mapping[str, Any]) -> str:
    """Milliseconds of put and get by route and size, and the ratios that have goals."""
    rows = []
    for title, raced in found["raced"].items():
        for name, rounds in raced.items():
            mid = medians(rounds)
            parts = [_ms(mid.get(key)) for key in ("put", "get", "moved")]
            told = "" if name == OURS else _times(paired_ratio(rounds, raced[OURS], "whole"))
            rows.append([title, name, *parts, _ms(mid["whole"]), told])
    goals, judged = found["goals"], found["raced"][found["judged"]]
    lines = [
        _goal(judged, PLAIN, OURS, goals["of_plain"]),
        _goal(judged, PLAIN, ADAPTER, goals["adapter_of_plain"]),
        *(_against_bare(judged, name, goals["of_bare"]) for name in (OURS, LEARNER)),
    ]
    ends = [_against_controller(found["raced"], way) for way in THROUGH.values()]
    sizes = ", ".join(f"{title}: {size / 1e6:.1f} MB" for title, size in found["bytes"].items())
    head = ["size", "way", "put, ms", "get, ms", "put + get", "end to end", f"÷ {OURS}, end to end"]
    text = f"{found['judged']}, put + get: " + " ".join(lines)
    more = "End to end: " + " ".join(ends) + f" Sizes: {sizes}."
    return "\n\n".join([f"### Data plane, {where(found)}", table(head, rows), text, more])


def _goal(raced: Rounds, slow: str, fast: str, goal: float) -> str:
    ratio, low, high = paired_ratio(raced[slow], raced[fast], "moved")
    said = verdict(ratio >= goal, f"{goal:g}×")
    return f"*{fast}* is {ratio:.1f}× ({low:.1f} to {high:.1f}) as fast as {slow}{said}."


def _against_bare(raced: Rounds, name: str, goal: float) -> str:
    ratio, low, high = paired_ratio(raced[name], raced[BARE], "moved")
    said = verdict(ratio <= goal, f"{goal:g}×")
    return f"*{name}* takes {ratio:.1f}× ({low:.1f} to {high:.1f}) the time of {BARE}{said}."


def _against_controller(raced: Mapping[str, Rounds], way: str) -> str:
    ratios = {title: paired_ratio(rounds[way], rounds[OURS], "whole")[0] for title, rounds in raced.items()}
    worst = min(ratios, key=lambda title: ratios[title])
    said = verdict(ratios[worst] > 1, "faster at every size")
    return f"*{way}* takes {ratios[worst]:.1f}× the time of *{OURS}* at least ({worst}){said}."


def routed_step(found: Mapping[str, Any]) -> str:
    """Seconds of a step by both ways, and the gain."""
    rows = []
    for title, raced in found["raced"].items():
        ours, *_ = raced
        for name, rounds in raced.items():
            mid = medians(rounds)
            ratio, low, high = paired_ratio(rounds, raced[ours], "seconds")
            gain = "" if name == ours else f"{ratio - 1:+.0%} ({low - 1:+.0%} to {high - 1:+.0%})"
            parts = [f"{mid[key]:.3f}" for key in ("computing", "moving")]
            rows.append([title, name, ranged(rounds, "seconds", ".3f"), *parts, gain])
    head = ["rows", "way", "s/step", "computing", "all else", "the step through the store is faster by"]
    least, most = found["published"]
    text = f"Published gains of such a change, end to end on many GPUs: {least:.0%} to {most:.1%}."
    return "\n\n".join([f"### A step by either way, {where(found)}", table(head, rows), text])


def store_keys(found: Mapping[str, Any]) -> str:
    """Microseconds for a row by operation and rows held."""
    operations = list(next(iter(next(iter(found["stores"].values())).values()))[0])
    rows, worst = [], {}
    for store, sizes in found["stores"].items():
        first = medians(next(iter(sizes.values())))
        growth = {name: 0.0 for name in operations}
        for size, rounds in sizes.items():
            mid = medians(rounds)
            growth = {name: max(growth[name], mid[name] / first[name]) for name in operations}
            rows.append([store, f"{int(size):,}", *(f"{1e6 * mid[name]:.2f}" for name in operations)])
        worst[store] = max((ratio, name) for name, ratio in growth.items())
    goal, lines = found["goal"], []
    for store, (ratio, name) in worst.items():
        lines.append(f"{store}: {name} grows most, {ratio:.2f}×{verdict(ratio <= goal, f'{goal:g}×')}.")
    head = ["store", "rows held", *(f"{name}, µs a row" for name in operations)]
    return "\n\n".join([f"### Cost of a row, {where(found)}", table(head, rows), "  \n".join(lines)])


def ray_step(found: Mapping[str, Any]) -> str:
    """Seconds of a step in both runtimes, by stage, and the start."""
    rows, stages = [], []
    goal = found["goal"]
    for title, raced in found["raced"].items():
        ratio, low, high = paired_ratio(raced["ray"], raced["local"], "seconds")
        for name, rounds in raced.items():
            mid = medians(rounds)
            more = f"{ratio - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
            told = more + verdict(ratio - 1 < goal, f"{goal:.0%}") if name == "ray" else ""
            rows.append([title, name, ranged(rounds, "seconds", ".3f"), f"{mid['start']:.1f}", told])
        local, ray = medians(raced["local"]), medians(raced["ray"])
        times = [f"{1e3 * local[s]:.0f} → {1e3 * ray[s]:.0f}" if s in local else "" for s in TIMED]
        stages.append([title, *times])
    shown = [i for i, _ in enumerate(TIMED) if any(line[i + 1] for line in stages)]
    by_stage = table(
        ["ms of a stage, local → ray", *(TIMED[i] for i in shown)],
        [[line[0], *(line[i + 1] for i in shown)] for line in stages],
    )
    head = ["setting", "runtime", "s/step", "s to start", "a step on Ray takes longer by"]
    alone = {title: {"local": raced["local"]} for title, raced in found["raced"].items()}
    title = f"### The demo's step on Ray, {where(found)}"
    return "\n\n".join([title, table(head, rows), by_stage, *busy(alone)])


def controller_memory(found: Mapping[str, Any]) -> str:
    """Peak memory by length of responses."""
    rows = []
    for name, peaks in found["peaks"].items():
        sizes = [peak["bytes"] for peak in peaks.values()]
        growth, goal = sizes[-1] - sizes[0], found["goal"]
        said = "" if name in THROUGH.values() else verdict(growth <= goal, f"{goal / 1e6:.0f} MB")
        told = f"{growth / 1e6:+.0f} MB{said}"
        rows.append([name, *(f"{size / 1e6:.0f}" for size in sizes), told])
    lengths = [f"×{times}, MB" for times in next(iter(found["peaks"].values()))]
    head = ["columns", *lengths, "growth"]
    return "\n\n".join([f"### Memory of the controller, {where(found)}", table(head, rows)])


def attention_memory(found: Mapping[str, Any]) -> str:
    """Peak memory of training rows by length, beside the plain model's."""
    rows = []
    for title, both in found["measured"].items():
        ours, plain = (both[name] for name in ("practicum", "plain"))
        ratio = ours["bytes"] / plain["bytes"]
        sizes = [f"{one['bytes'] / 1e6:.0f}" for one in (ours, plain)]
        seconds = [f"{one['cpu_seconds']:.1f}" for one in (ours, plain)]
        told = f"{ratio:.2f}{verdict(ratio <= found['goal'], format(found['goal'], 'g'))}"
        rows.append([title, *sizes, told, *seconds])
    head = ["tokens", "practicum, MB", "plain, MB", "ratio", "practicum, s of processor", "plain, s"]
    ours, plain, goal = (*(found["exponents"][name] for name in ("practicum", "plain")), found["growth_goal"])
    told = f"{ours:.2f}{verdict(ours <= goal, f'{goal:g}')}, plain {plain:.2f}"
    text = f"Exponent of growth with the length (1 is linear): {told}."
    return "\n\n".join([f"### Memory of long rows, {where(found)}", table(head, rows), text])


def learner_memory(found: Mapping[str, Any]) -> str:
    """Memory of the optimizer's state."""
    rows = []
    for name, rounds in found["stepped"].items():
        middle = medians(rounds)
        share = f"{middle['bytes'] / found['weights']:.2f}"
        rows.append([name, f"{middle['bytes'] / 1e6:.1f}", share, f"{1e3 * middle['seconds']:.0f}"])
    head = ["optimizer", "its state between steps, MB", "÷ weights", "a step, ms"]
    text = f"The weights have {found['weights'] / 1e6:.1f} MB."
    return "\n\n".join([f"### Memory of the learner, {where(found)}", table(head, rows), text])


def rank_memory(found: Mapping[str, Any]) -> str:
    """Memory of a rank while it loads its model."""
    rows = []
    for dtype, ways in found["loaded"].items():
        weights = found["parameters"] * (4 if dtype == "float32" else 2)
        most = [max(rank["bytes"] for rank in ways[way]) for way in ("whole", "shards")]
        cells = [f"{taken / 1e6:,.0f} ({taken / weights:.2f})" for taken in most]
        rows.append([dtype, f"{weights / 1e6:,.0f}", *cells])
    head = ["number type", "weights, MB", "a rank that reads all, MB (÷ weights)", "that reads its shards"]
    text = f"{found['parameters'] / 1e6:.0f}M parameters on {found['ranks']} ranks."
    return "\n\n".join([f"### Memory of loading, {where(found)}", table(head, rows), text])


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _times(ratio: tuple[float, float, float]) -> str:
    middle, low, high = ratio
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"
