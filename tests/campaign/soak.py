"""A long run of tiny agents with teachers on Ray: what its processes hold, and whether that grows."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import yaml

from tests.campaign import child
from tests.campaign.processes import MARK, Family, end_cleanly
from tests.campaign.scenarios import save_models, soak_recipe
from tests.cluster import ENV

WARM = 0.2
"""Share of the steps that is not counted: caches fill."""
GROWING = ("rss_mb", "handles", "threads")


class Soak:
    """The samples of each process, and of the run folder."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.samples: dict[str, list[tuple[int, dict[str, float]]]] = defaultdict(list)

    def look(self, step: int, processes: dict[int, str]) -> None:
        """Note what each process holds after this step."""
        for pid, text in processes.items():
            if (held := _held(pid)) is not None:
                self.samples[f"{_title(text)} {pid}"].append((step, held))
        files = sum(len(names) for _, _, names in os.walk(self._run))
        self.samples["files of the run folder"].append((step, {"files": float(files)}))

    def rows(self, steps: int) -> list[dict[str, Any]]:
        """Each process that was there for most of the time: its memory, and growth per 1,000 steps."""
        rows = []
        for name, samples in sorted(self.samples.items()):
            counted = [(step, held) for step, held in samples if step >= WARM * steps]
            if len(counted) < 5 or counted[-1][0] < 0.9 * steps:
                continue
            row: dict[str, Any] = {"process": re.sub(r" \d+$", "", name)}
            for kind in counted[0][1]:
                slope = linear_regression([s for s, _ in counted], [h[kind] for _, h in counted]).slope
                row |= {kind: round(counted[-1][1][kind], 1), f"{kind}_slope": round(1000 * slope, 3)}
                row[f"{kind}_mean"] = round(fmean(h[kind] for _, h in counted), 1)
            rows.append(row)
        return rows


def _held(pid: int) -> dict[str, float] | None:
    """Memory of its own, open handles and threads."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        memory = {line.split(":")[0]: line.split(":")[1] for line in status.splitlines() if ":" in line}
        own = sum(int(memory[name].split()[0]) for name in ("RssAnon", "RssShmem"))
        handles = len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, KeyError, ValueError):
        return None
    return {"rss_mb": own / 1024, "handles": float(handles), "threads": float(memory["Threads"])}


def _title(text: str) -> str:
    """What a process is, in a few words."""
    if match := re.match(r"ray::(\w+)", text):
        return match[1]
    for words, name in {
        "gcs_server": "gcs_server",
        "raylet/raylet": "raylet",
        "tests.campaign.soak": "controller",
    }.items():
        if words in text:
            return name
    return (re.findall(r"([\w-]+)\.py\b", text) or [text.split(" ")[0].rpartition("/")[2]])[0]


def main() -> int:
    """Run, watch, write the slopes; exit code 0 if the run ended well."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=int, default=25, help="steps between two looks")
    parser.add_argument("--minutes", type=float, default=90.0, help="stop after this long")
    parser.add_argument("--result", type=Path, default=None, help="a JSON file for the slopes")
    options = parser.parse_args()
    end_cleanly()
    mark = f"soak-{os.getpid()}"
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    os.environ.update(ENV | {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths})
    work = Path(tempfile.mkdtemp(prefix="soak-"))
    os.environ["RAY_TMPDIR"] = str(work)
    family, began, seen = Family(mark), time.monotonic(), 0
    soak = Soak(work / "run")
    try:
        save_models(work / "models")
        recipe = work / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(soak_recipe(work / "models", options.steps)))
        run = child.Run([str(recipe), "--out", str(work / "run")], work / "output.txt")
        while run.code is None and time.monotonic() - began < 60 * options.minutes:
            run.listen(1.0)
            if run.step >= seen + options.every:
                seen = run.step
                soak.look(seen, family.look())
                _write(options.result, soak, seen, run.code, time.monotonic() - began)
        print(run.printed()[-600:])
        _write(options.result, soak, seen, run.code, time.monotonic() - began)
        return run.code or 0
    finally:
        family.kill()
        shutil.rmtree(work, ignore_errors=True)


def _write(path: Path | None, soak: Soak, steps: int, code: int | None, seconds: float) -> None:
    content = {"steps": steps, "seconds": round(seconds), "exit_code": code, "processes": soak.rows(steps)}
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
