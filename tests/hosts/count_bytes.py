"""Count the bytes that cross each host's interface in a step: `python -m tests.hosts.count_bytes FILE.jsonl`.

Three hosts: the controller (with Ray's head), two learner ranks, two rollout replicas with the reward worker.
Batches and responses grow. Each size runs as it is and with the control of `driver.py`, in which the
controller forwards columns. Bytes are per step, from the first step's end to the last one's. FILE has a line
for each setting; those that have one are not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from tests.campaign.processes import end_cleanly
from tests.hosts.cuts import roles_of
from tests.hosts.ray_hosts import HOST_ENV, RayHosts

STEPS = 5
HOSTS = {"controller": 0, "learner": 2, "rollout": 3}
TEXT = {"copy": {"kind": "copy", "options": {"length": [8, 8], "letters": 5}}}
IMAGES = {"dots": {"kind": "dots", "options": {"pictures": [3, 3], "size": [56, 56]}}}
SIZES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "batch ×1": (8, 32, TEXT),
    "batch ×4": (32, 32, TEXT),
    "batch ×16": (128, 32, TEXT),
    "responses ×8": (8, 256, TEXT),
    "images": (8, 32, IMAGES),
}
"""Prompts of a step, of 8 samples each, tokens of a response, and tasks."""
RUNS = [(1000, size) for size in SIZES] + [(100, size) for size in SIZES if size != "images"]
"""Mbit/s of each link, and sizes."""


def recipe(address: str, prompts: int, tokens: int, tasks: dict[str, Any]) -> dict[str, Any]:
    model = {"hidden": 128, "layers": 4, "heads": 4, "head_dim": 32, "context": 512}
    family = {"family": "qwen2_5_vl"} if tasks is IMAGES else {}
    return {
        "name": "bytes",
        "model": {"random_init": model | family},
        "tasks": tasks,
        "rollout": {"samples": 8, "max_new_tokens": tokens, "replicas": 2},
        "train": {"steps": STEPS, "prompts": prompts, "minibatches": 2, "lr": 1e-4},
        "eval": {"rows": 0},
        "checkpoint": {"every": 1000},
        "track": {"record": "none"},
        "runtime": {"kind": "ray", "address": address, "threads": 1},
        "pools": {"train": {"devices": 2}, "rollout": {"devices": 2}},
    }


def measure(
    hosts: RayHosts, folder: Path, prompts: int, tokens: int, tasks: dict[str, Any], forward: bool
) -> dict[str, Any]:
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe(hosts.address, prompts, tokens, tasks)))
    command = [sys.executable, "-m", "tests.hosts.driver", str(file), *(["--forward"] if forward else [])]
    driver = hosts.head.start(command, env=HOST_ENV, cwd=folder, stdout=subprocess.PIPE)
    counts, steps, roles = [], [], {}
    for line in driver.stdout:
        if line.startswith("{") and "time/step" in line:
            counts.append({name: host.bytes() for name, host in hosts.hosts.items()})
            steps.append(json.loads(line))
            roles = {name: roles_of(host) for name, host in hosts.hosts.items()}
    if driver.wait(60) or len(steps) != STEPS:
        raise OSError(f"the run ended with exit code {driver.returncode} after {len(steps)} steps")
    count = STEPS - 1
    sent = {
        name: [(new - old) / count for old, new in zip(counts[0][name], counts[-1][name], strict=True)]
        for name in hosts.hosts
    }
    return {
        "prompts": prompts,
        "response_tokens": tokens,
        "tokens": median(step["rollout/tokens"] for step in steps[1:]),
        "forward": forward,
        "received_and_sent": sent,
        "roles": roles,
        "seconds": median(step["time/step"] for step in steps[1:]),
        "controller_peak_mib": steps[-1]["peak_mib"],
    }


def main() -> None:
    end_cleanly()
    results, began = Path(sys.argv[1]), time.monotonic()
    minutes = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    lines = results.read_text().splitlines() if results.exists() else []
    done = {(row["what"], row["megabits"], row["forward"]) for row in map(json.loads, lines)}
    rest = [(mbits, size, forward) for mbits, size in RUNS for forward in (False, True)]
    with tempfile.TemporaryDirectory() as name, RayHosts(HOSTS, [Path(name)]) as hosts:
        for mbits, size, forward in rest:
            if (size, mbits, forward) in done or time.monotonic() - began > 60 * minutes:
                continue
            for host in hosts.hosts.values():
                host.throttle(mbits)
            result = measure(hosts, Path(name), *SIZES[size], forward)
            with results.open("a") as file:
                file.write(json.dumps({"what": size, "megabits": mbits} | result) + "\n")
            print(size, mbits, json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
