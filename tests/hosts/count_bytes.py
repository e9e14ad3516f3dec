"""Count the bytes that cross each host's interface in a step: `python -m tests.hosts.count_bytes FILE.jsonl`.

Three hosts: the controller (with Ray's head), two learner ranks, two rollout replicas with the reward worker.
Batches and responses grow. After these, hosts with one worker each: a rank, a replica, a reward worker and
an own teacher. Each size runs as it is and with the control of `driver.py`, in which the
controller forwards columns. Bytes are per step, from the first step's end to the last one's. FILE has a line
for each setting; those that have one are not run again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tests.campaign.processes import end_cleanly
from tests.hosts.cuts import roles_of
from tests.hosts.ray_hosts import HOST_ENV, RayHosts
from tests.teachers.tiny_teachers import save_teacher

STEPS = 4
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
RUNS = [(1000, "batch ×1"), (1000, "batch ×16"), (1000, "responses ×8"), (1000, "batch ×4")]
RUNS += [(100, "batch ×16"), (100, "responses ×8"), (1000, "images"), (100, "batch ×1"), (100, "batch ×4")]
"""Mbit/s of each link, and sizes."""
BY_ROLE, IDLE_S = "batch ×4, one worker per host", 5.0


def recipe(
    address: str, prompts: int, tokens: int, tasks: dict[str, Any], teacher: str = ""
) -> dict[str, Any]:
    """With a teacher, which is a model's folder, each worker has its own host."""
    model = {"hidden": 128, "layers": 4, "heads": 4, "context": 512}
    family = {"family": "qwen2_5_vl"} if tasks is IMAGES else {}
    count = 1 if teacher else 2
    taught = {"own": {"model": teacher, "placement": "own"}}
    more = {"teachers": taught, "distill": {"signal": "top_k", "top_k": 8}} if teacher else {}
    return more | {
        "name": "bytes",
        "model": {"random_init": model | family},
        "tasks": tasks,
        "rollout": {"samples": 8, "max_new_tokens": tokens},
        "train": {"steps": STEPS, "prompts": prompts, "minibatches": 2, "lr": 1e-4},
        "eval": {"rows": 0},
        "checkpoint": {"every": 1000},
        "track": {"record": "none"},
        "runtime": {"kind": "ray", "address": address, "threads": 1},
        "pools": {"train": {"devices": count}, "rollout": {"devices": count}},
    }


def measure(hosts: RayHosts, folder: Path, size: str, forward: bool, teacher: str = "") -> dict[str, Any]:
    prompts, tokens, tasks = SIZES[size]
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe(hosts.address, prompts, tokens, tasks, teacher)))
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

    def rest(settings: list[tuple[str, int, bool]]) -> Iterator[tuple[str, int, bool]]:
        for setting in settings:
            if setting not in done and time.monotonic() - began < 60 * minutes:
                yield setting

    def write(what: str, mbits: int, result: dict[str, Any]) -> None:
        with results.open("a") as file:
            file.write(json.dumps({"what": what, "megabits": mbits} | result) + "\n")
        print(what, mbits, json.dumps(result), flush=True)

    with tempfile.TemporaryDirectory() as name:
        with RayHosts(HOSTS, [Path(name)]) as hosts:
            for size, mbits, forward in rest([(s, m, f) for m, s in RUNS for f in (False, True)]):
                for host in hosts.hosts.values():
                    host.throttle(mbits)
                write(size, mbits, measure(hosts, Path(name), size, forward))
        for what, mbits, _ in rest([(BY_ROLE, 1000, False)]):
            teacher = save_teacher(Path(name) / "teacher", seed=1, hidden=128)
            workers = {f"worker{number}": 1 for number in range(4)}
            with RayHosts({"controller": 0, **workers}, [Path(name)]) as hosts:
                before = sum(hosts.head.bytes())
                time.sleep(IDLE_S)
                idle = (sum(hosts.head.bytes()) - before) / IDLE_S
                result = measure(hosts, Path(name), "batch ×4", False, teacher)
                write(what, mbits, result | {"idle_bytes_per_s": idle})


if __name__ == "__main__":
    main()
