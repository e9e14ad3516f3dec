"""The docs' tables of what was measured on several hosts, from the stored results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_ACTIONS = {
    "cut 5 s": "link cut for 5 s",
    "cut 60 s": "link cut for 60 s",
    "cut": "link cut for good",
    "death": "host lost",
    "return": "host and spare lost, host back after 15 s",
    "throttle": "link throttled to 1 Mbit/s",
}
_HOSTS = {
    "learner": "learner rank",
    "rollout": "rollout replica",
    "reward": "reward worker",
    "teacher": "own teacher",
    "server": "teacher behind a URL",
    "unit": "TransferQueue unit",
    "head": "controller",
}


def _read(name: str) -> list[dict[str, Any]]:
    text = (RESULTS / name).read_text()
    return json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cuts_table() -> str:
    """How runs ended whose hosts were cut off or lost."""
    rows, cases = [], _read("host_cuts.jsonl")
    for action, shown in _ACTIONS.items():
        cells, these = [], [case for case in cases if case["action"] == action]
        if not these:
            continue
        for host in _HOSTS:
            ends = Counter(case["end"] for case in these if case["host"] == host and not case["problems"])
            cells.append(", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
        failed = sum(bool(case["problems"]) for case in these)
        longest = max(case["seconds"] for case in these)
        rows.append([shown, *cells, str(failed), f"{longest:.0f} s"])
    return _table(["what happened", *_HOSTS.values(), "failed", "longest"], rows)


def bytes_table() -> str:
    """Bytes of each host, and seconds, of a step and of the control."""
    found = {(row["what"], row["megabits"], row["forward"]): row for row in _read("host_bytes.jsonl")}
    rows = []
    for (what, megabits, forward), ours in sorted(found.items(), key=lambda item: -item[0][1]):
        control = found.get((what, megabits, True))
        if forward or control is None:
            continue
        cells = []
        for row in (ours, control):
            sent = row["received_and_sent"]
            controller = sum(sent["controller"])
            workers = sum(sum(both) for name, both in sent.items() if name != "controller")
            between = (workers - controller) / 2
            cells.append([f"{controller / 1e3:,.0f}", f"{between / 1e3:,.0f}", f"{row['seconds']:.2f}"])
            cells[-1].append(f"{controller / between:.1%}" if between > 0 else "–")
        (mine, between, mine_s, share), (theirs, _, theirs_s, _) = cells
        speed = f"{control['seconds'] / ours['seconds']:.1f}×"
        peaks = [f"{row['controller_peak_mib']:,.0f}" for row in (ours, control)]
        name = f"{what}, {'1 Gbit/s' if megabits == 1000 else f'{megabits} Mbit/s'}"
        seconds = f"{mine_s}, {theirs_s} ({speed})"
        rows.append([name, f"{ours['tokens']:,.0f}", between, mine, share, theirs, seconds, ", ".join(peaks)])
    head = ["step and links", "tokens", "kB between workers", "kB of the controller", "share"]
    head += ["kB of a forwarding controller", "s per step, and forwarding", "controller's peak MiB"]
    return _table(head, rows)


def roles_table() -> str:
    """Bytes of hosts with one worker each."""
    (row,) = (row for row in _read("host_bytes.jsonl") if "idle_bytes_per_s" in row)
    rows = []
    for host, (received, sent) in row["received_and_sent"].items():
        roles = [role for role in row["roles"][host] if role in _HOSTS]
        name = "controller" if host == "controller" else " and ".join(_HOSTS[role] for role in roles)
        rows.append([name, f"{received / 1e3:,.0f}", f"{sent / 1e3:,.0f}"])
    return _table(["host of", "kB received", "kB sent"], rows)


def weights_table() -> str:
    """Weights from one host to another."""
    rows = []
    for row in _read("host_weights.json"):
        way = {"object_store": "object store", "nixl": "NIXL"}[row["way"]]
        numbers = f"{row['mib_received']:.0f} MiB", f"{row['seconds'] * 1e3:.0f} ms"
        rows.append([way, str(row["engines"]), f"{row['mib']:.0f} MiB", *numbers])
    return _table(["way", "engines on the other host", "weights", "the host received", "time"], rows)


def control_plane_table() -> str:
    """The controller alone."""
    rows = []
    for row in sorted(_read("control_plane.json"), key=lambda row: (row["streamed"], row["rows"])):
        way = "one by one" if row["streamed"] else "together"
        per_row = f"{row['seconds'] / row['rows'] * 1e6:.0f} µs", f"{row['bytes'] / row['rows']:.0f}"
        index = f"{row['index']:.2f}"
        cells = [f"{row['rows']:,}", way, f"{row['seconds']:.2f}", *per_row, f"{row['peak_mib']:,.0f}", index]
        rows.append(cells)
    head = ["rows", "scored", "s per step", "per row", "bytes per row", "peak MiB", "s of the store's index"]
    return _table(head, rows)
