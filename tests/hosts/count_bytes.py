"""Count the bytes that cross each host's interface in a step: `python -m tests.hosts.count_bytes FILE`.

Three hosts: the controller (with Ray's head), two learner ranks, two rollout replicas with the reward worker.
Batches and responses grow. Each size runs as it is and with the control of `driver.py`, in which the
controller forwards columns. Bytes are per step, from the first step's end to the last one's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tests.hosts.ray_hosts import HOST_ENV, RayHosts

STEPS = 6
HOSTS = {"controller": 0, "learner": 2, "rollout": 4}
LINKS = (None, 1000, 100)
"""Mbit/s of each link."""
SIZES = {
    "batch ×1": (8, 32),
    "batch ×4": (32, 32),
    "batch ×16": (128, 32),
    "responses ×8": (8, 256),
}
"""Prompts of a step, of 8 samples each, and tokens of a response."""


def recipe(address: str, prompts: int, tokens: int) -> dict[str, Any]:
    model = {"hidden": 32, "layers": 2, "heads": 2, "context": 512}
    return {
        "name": "bytes",
        "model": {"random_init": model},
        "tasks": {"copy": {"kind": "copy", "options": {"length": [8, 8], "letters": 5}}},
        "rollout": {"samples": 8, "max_new_tokens": tokens},
        "train": {"steps": STEPS, "prompts": prompts, "lr": 1e-4},
        "track": {"record": "none"},
        "runtime": {"kind": "ray", "address": address, "threads": 1},
        "pools": {"train": {"devices": 2}, "rollout": {"devices": 2}},
    }


def measure(hosts: RayHosts, folder: Path, prompts: int, tokens: int, forward: bool) -> dict[str, Any]:
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe(hosts.address, prompts, tokens)))
    command = [sys.executable, "-m", "tests.hosts.driver", str(file), *(["--forward"] if forward else [])]
    driver = hosts.head.start(command, env=HOST_ENV, cwd=folder, stdout=subprocess.PIPE)
    counts, steps = [], []
    for line in driver.stdout:
        if line.startswith("{") and "time/step" in line:
            counts.append({name: host.bytes() for name, host in hosts.hosts.items()})
            steps.append(json.loads(line))
    if driver.wait(60) or len(steps) != STEPS:
        raise SystemExit(f"the run ended with exit code {driver.returncode} after {len(steps)} steps")
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
        "seconds": median(step["time/step"] for step in steps[1:]),
        "controller_peak_mib": steps[-1]["peak_mib"],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name, RayHosts(HOSTS, [Path(name)]) as hosts:
        results = []
        for megabits in LINKS:
            if megabits:
                for host in hosts.hosts.values():
                    host.throttle(megabits)
            for what, (prompts, tokens) in SIZES.items():
                for forward in (False, True):
                    result = measure(hosts, Path(name), prompts, tokens, forward)
                    results.append({"what": what, "megabits": megabits} | result)
                    print(json.dumps(results[-1]), flush=True)
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
