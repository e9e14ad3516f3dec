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


def _carried(row: dict[str, Any]) -> tuple[float, float]:
    """Return the bytes of a step that the controller's host sends and receives, and those between others."""
    sent = row["received_and_sent"]
    controller = sum(sent["controller"])
    workers = sum(sum(both) for name, both in sent.items() if name != "controller")
    return controller, (workers - controller) / 2


def _pairs(megabits: int = 1000) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each kind of step as it is, and with a controller that forwards columns, at this speed."""
    found = {(row["what"], row["megabits"], row["forward"]): row for row in _read("host_bytes.jsonl")}
    return [
        (row, found[what, mbits, True])
        for (what, mbits, forward), row in found.items()
        if not forward and mbits == megabits
    ]


def bytes_table() -> str:
    """Bytes of the controller's host in a step, and of its control, at 1 Gbit/s."""
    rows = []
    for ours, control in _pairs():
        (mine, between), (theirs, _) = _carried(ours), _carried(control)
        cells = [f"{ours['tokens']:,.0f}", *(f"{count / 1e3:,.0f}" for count in (between, mine))]
        added = [f"{row['controller_added_mib']:,.1f}" for row in (ours, control)]
        rows.append([ours["what"], *cells, f"{mine / between:.2%}", f"{theirs / 1e3:,.0f}", *added])
    head = ["step", "sampled tokens", "kB between workers", "kB of the controller", "share"]
    head += ["kB of the control", "MiB added", "by the control"]
    return _table(head, rows)


def step_seconds_table() -> str:
    """Seconds of a step, and of its control."""
    seconds: dict[str, list[str]] = {}
    timed = [pair for megabits in (1000, 100) for pair in _pairs(megabits) if pair[0]["timed"]]
    for ours, control in timed:
        ratio = control["seconds"] / ours["seconds"]
        cells = seconds.setdefault(ours["what"], [])
        cells += [f"{ours['seconds']:.2f}", f"{control['seconds']:.2f}", f"{ratio:.2f}"]
    head = ["step", "s at 1 Gbit/s", "the control", "ratio", "s at 100 Mbit/s", "the control", "ratio"]
    return _table(head, [[what, *cells] for what, cells in seconds.items()])


def roles_table() -> str:
    """Bytes that each of three hosts receives and sends in a step, at 1 Gbit/s."""
    steps = [ours for ours, _ in _pairs() if len(ours["roles"]) == 3]
    kilobytes: dict[str, dict[str, str]] = {}
    for step in steps:
        for host, both in step["received_and_sent"].items():
            for way, count in zip(("received", "sent"), both, strict=True):
                row = kilobytes.setdefault(f"{_name(step['roles'][host])}: {way}", {})
                row[step["what"]] = f"{count / 1e3:,.0f}"
    head = [step["what"] for step in steps]
    rows = [[name, *(row.get(what, "") for what in head)] for name, row in kilobytes.items()]
    return _table(["kB of the host of", *head], rows)


def workers_table() -> str:
    """Bytes that each host receives and sends in a step, at 1 Gbit/s, with one worker on each."""
    head = ["host of", "kB received", "kB sent"]
    steps = [ours for ours, _ in _pairs() if len(ours["roles"]) > 3]
    hosts = [
        (step["roles"][name], both) for step in steps for name, both in step["received_and_sent"].items()
    ]
    return _table(head, [[_name(roles), *(f"{count / 1e3:,.0f}" for count in both)] for roles, both in hosts])


def _name(roles: Sequence[str]) -> str:
    return " and ".join(_HOSTS.get(role, f"store's {role}") for role in roles) or "controller"


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
        parts = f"{row['peak_mib']:,.0f}", f"{row['garbage']:.2f}", f"{row['index']:.2f}"
        cells = [f"{row['rows']:,}", way, f"{row['seconds']:.2f}", *per_row, *parts]
        rows.append(cells)
    head = ["rows", "scored", "s per step", "per row", "bytes per row", "peak MiB"]
    head += ["s of it in garbage collection", "s of the store's index"]
    return _table(head, rows)
