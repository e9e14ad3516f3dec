"""The tables of docs/reliability.md, from the stored results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|", *body])


def kills() -> list[dict[str, Any]]:
    """All kills of the stored campaigns; those that found no such process are no kills."""
    campaigns = [campaign for file in sorted(RESULTS.glob("kills*.json")) for campaign in stored(file)]
    return [row for campaign in campaigns for row in campaign["kills"] if row["end"] != "missed"]


def stored(file: Path) -> list[dict[str, Any]]:
    """The campaigns of a file of results, each with its seed, its seconds and its kills."""
    return json.loads(file.read_text())


def lag_table() -> str:
    """The same of runs with `async.lag` alone."""
    return kills_table([row for row in kills() if " lag " in row["scenario"]])


def kills_table(total: list[dict[str, Any]] | None = None) -> str:
    """By runtime and kind of process: how often it was struck, and what came of it; all, if not told."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    total = kills() if total is None else total
    for row in total:
        runtime = row["scenario"].split(":")[0]
        cells.setdefault((runtime, row["victim"]), []).append(row)
    lines = []
    for (runtime, victim), rows in sorted(cells.items()):
        counts = [
            "–" if not some else f"{len(some)} ({_ends(some)})"
            for name in ("KILL", "STOP")
            for some in [[row for row in rows if row["signal"] == name]]
        ]
        longest = max(row["seconds"] for row in rows)
        lines.append(
            (runtime, victim, *counts, f"{longest:.0f} s", sum(bool(row["problems"]) for row in rows))
        )
    ends = [f"{sum(r['signal'] == s for r in total)}" for s in ("KILL", "STOP")]
    lines.append(("**all**", "", *ends, "", sum(bool(row["problems"]) for row in total)))
    columns = ("runtime", "process", "killed", "stopped", "longest until it continued or ended", "failed")
    return table(columns, lines)


def _ends(rows: list[dict[str, Any]]) -> str:
    found = {end: sum(row["end"] == end for row in rows) for end in ("continued", "resumed")}
    return ", ".join(f"{count} {end}" for end, count in found.items() if count)


def fuzz_table() -> str:
    """What was fuzzed, and how much of it was accepted, refused with a sentence, or failed."""
    found = json.loads((RESULTS / "fuzz.json").read_text())["found"]
    rows = []
    for row in found:
        refused = row.get("refused", 0) + row.get("refused by check", 0)
        rows.append((row["kind"], row.get("accepted", 0), refused, len(row["failures"])))
    return table(("input", "accepted", "refused with a sentence", "failed"), rows)


def soak_table() -> str:
    """What grew in a long run, for each process, per 1,000 steps."""
    soak = json.loads((RESULTS / "soak.json").read_text())
    rows = [
        (row["process"], f"{row['rss_mb']:.0f} MB", *(f"{row[f'{name}_slope']:+.2f}" for name in _GROWING))
        for row in soak["processes"]
        if "rss_mb" in row
    ]
    files = next(row for row in soak["processes"] if "files" in row)
    rows.append(
        (files["process"], f"{files['files']:.0f} files", f"{files['files_slope']:+.2f} files", "", "")
    )
    columns = (f"process, over {soak['steps']} steps", "memory at the end", "MB", "file handles", "threads")
    return table(columns, rows)


_GROWING = ("rss_mb", "handles", "threads")
