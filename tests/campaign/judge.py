"""What must hold after a kill: the numbers of the undisturbed run, and nothing left behind."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from tests.campaign.processes import Family, reap, shared_memory

_TIMED = re.compile(r"time/.*|.*/tokens_per_second|teacher/.*/(seconds|wakes)|teachers/hidden|cluster/.*")
"""Metrics that the clock or a death makes."""
GONE_S = 150.0
"""Ray's agents wait a minute for the rest of a cluster whose driver was killed; longer where it is busy."""
SHARED_S = 30.0
_ROUNDED = 1e-3


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; a run that is killed may leave half a line, which a resumed one cuts."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def compare(reference: Path, run: Path, *, exact: bool, finished: bool) -> list[str]:
    """How a run differs from the undisturbed one of the same recipe: in sentences, empty if it does not."""
    problems: list[str] = []
    ours, theirs = (rows_of(folder / "metrics.jsonl") for folder in (run, reference))
    steps = [row["step"] for row in ours]
    if steps != list(range(len(theirs) if finished else len(steps))):
        problems.append(f"metrics.jsonl has the steps {steps}")
    for mine, other in zip(ours, theirs, strict=False):
        differing = _differing(mine, other, exact)
        if differing:
            problems.append(f"step {mine['step']} differs in {', '.join(differing[:4])}")
    if finished:
        for name in ("samples.jsonl", "eval.jsonl"):
            ids = [row["id"] for row in rows_of(run / name)]
            if ids != [row["id"] for row in rows_of(reference / name)]:
                problems.append(f"{name} has other records, or some twice")
            elif exact and (run / name).read_bytes() != (reference / name).read_bytes():
                problems.append(f"{name} differs")
        weights = Path("export/model.safetensors")
        if exact and (run / weights).read_bytes() != (reference / weights).read_bytes():
            problems.append("the exported weights differ")
    return problems


def _differing(mine: dict[str, Any], other: dict[str, Any], exact: bool) -> list[str]:
    names = [name for name in dict.fromkeys([*mine, *other]) if not _TIMED.fullmatch(name)]
    if exact:
        return [name for name in names if mine.get(name) != other.get(name)]
    return [
        name
        for name in names
        if name not in mine
        or name not in other
        or abs(mine[name] - other[name]) > _ROUNDED * (1 + abs(other[name]))
    ]


def left_behind(
    family: Family, spared: Callable[[int, str], bool], shared_before: Collection[str]
) -> list[str]:
    """Processes and shared memory that a run left; looks until they are gone or it has been too long."""
    deadline = time.monotonic() + GONE_S
    while True:
        reap()
        left = {pid: text for pid, text in family.look().items() if not spared(pid, text)}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    problems = [f"process {pid} is left: {text[:80]}" for pid, text in left.items()]
    files, deadline = shared_memory() - set(shared_before), time.monotonic() + SHARED_S
    while files and time.monotonic() < deadline:  # another program's, which is about to open it
        time.sleep(0.5)
        files &= shared_memory()
    return problems + [f"shared memory is left: {name}" for name in sorted(files)]
