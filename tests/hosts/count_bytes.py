"""Count the bytes that cross each host's interface in a step: `python -m tests.hosts.count_bytes FILE.jsonl`.

Three hosts: the controller (with Ray's head), two learner ranks, two rollout replicas with the reward worker.
Batches and responses grow. After these, hosts with one worker each: a rank, a replica, a reward worker and
an own teacher. Steps as they are alternate with the control of `driver.py`, in which the controller forwards
columns. FILE has a line for each size, speed and control; sizes that have theirs are not run again. With
`--beside-others`, other jobs run on the machine, and the seconds are not for the docs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from subprocess import PIPE
from threading import Timer
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from practicum.models.load_model import load_tokenizer
from practicum.recipe.schema.recipe import Model
from tests.campaign.processes import end_cleanly
from tests.hosts.cuts import roles_of
from tests.hosts.ray_hosts import HOST_ENV, RayHosts
from tests.teachers.tiny_teachers import save_teacher

HOSTS = {"controller": 0, "learner": 2, "rollout": 3}
TEXT = {"copy": {"kind": "copy", "options": {"length": [8, 8], "letters": 5}}}
IMAGES = {"dots": {"kind": "dots", "options": {"pictures": [3, 3], "size": [56, 56]}}}
MODEL = {"hidden": 256, "layers": 4, "heads": 4, "context": 512}
SIZES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "batch ×1": (8, 32, TEXT, {}),
    "batch ×4": (32, 32, TEXT, {}),
    "batch ×16": (128, 32, TEXT, {}),
    "responses ×8": (8, 256, TEXT, {}),
    "images": (8, 32, IMAGES, {}),
    "teacher, batch ×1": (8, 32, TEXT, {"placement": "colocated"}),
    "teacher, batch ×4": (32, 32, TEXT, {"placement": "colocated"}),
    "teacher, batch ×16": (128, 32, TEXT, {"placement": "colocated"}),
    "one worker per host": (32, 32, TEXT, {"placement": "own"}),
}
"""Prompts of a step, of 8 samples each, tokens of a response, tasks, and a teacher (32 logprobs a token)."""
ROUNDS, MBITS = 5, (1000, 100)
PLAN = [(mbits, number % 4 in (1, 2)) for mbits in MBITS for number in range(2 * ROUNDS)]
"""Steps that count: Mbit/s of each link, and if the controller forwards. Each kind comes as often before
the other one as after it."""
WARM_UP = [(MBITS[0], False), (MBITS[0], True)]
"""Steps before these, which do not count."""
BY_ROLE, LATE_S = "one worker per host", 500.0
REPORTS = {"REPORTER_UPDATE_INTERVAL_MS": os.environ.get("REPORTER_UPDATE_INTERVAL_MS", "60000")}
"""What docs/cluster.md recommends for `ray start`, if the environment does not have it."""


def save_student(folder: Path) -> None:
    """Save a model that never ends a response: its end token's vector is opposite to all others'."""
    save_teacher(folder, seed=0, scale=1.0, **MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ends: Any = load_tokenizer(Model(path=str(folder))).eos_token_id
    embeddings: Any = model.get_input_embeddings()  # the output head's too
    with torch.no_grad():
        embeddings.weight[:, 0] = 1.0
        embeddings.weight[ends, 0] = -1.0
    model.save_pretrained(folder)


def recipe(address: str, folder: Path, size: str) -> dict[str, Any]:
    prompts, tokens, tasks, teacher = SIZES[size]
    images = {"random_init": MODEL | {"family": "qwen2_5_vl"}}
    count = 1 if size == BY_ROLE else 2
    taught = {"teacher": {"model": str(folder / "teacher"), **teacher}}
    more = {"teachers": taught, "distill": {"signal": "top_k", "top_k": 32}} if teacher else {}
    return more | {
        "name": "bytes",
        "model": images if tasks is IMAGES else {"path": str(folder / "student")},
        "tasks": tasks,
        "rollout": {"samples": 8, "max_new_tokens": tokens},
        # So low a rate that no teacher makes the student end responses: all steps have equally many tokens.
        "train": {"steps": 1 + len(WARM_UP + PLAN), "prompts": prompts, "minibatches": 2, "lr": 1e-7},
        "eval": {"rows": 0},
        "checkpoint": {"every": 1000},
        "track": {"record": "none"},
        "runtime": {"kind": "ray", "address": address, "threads": 1},
        "pools": {"train": {"devices": count}, "rollout": {"devices": count}},
    }


def measure(hosts: RayHosts, folder: Path, size: str, timed: bool) -> list[dict[str, Any]]:
    """Run the first step and those of WARM_UP and PLAN; return a row for each kind of step."""
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe(hosts.address, folder, size)))
    command, pipes = [sys.executable, "-m", "tests.hosts.driver", str(file)], {"stdin": PIPE, "stdout": PIPE}
    driver = hosts.head.start(command, env=HOST_ENV, cwd=folder, **pipes)
    late = Timer(LATE_S, driver.kill)
    late.daemon = True
    late.start()
    upcoming, steps, before, roles = iter([*WARM_UP, *PLAN, PLAN[0]]), defaultdict(list), {}, {}
    setting = None
    for line in driver.stdout:
        if not line.startswith("{"):
            continue
        counts = {name: host.bytes() for name, host in hosts.hosts.items()}
        if setting is not None:
            sent = {
                name: [new - old for old, new in zip(before[name], counts[name], strict=True)]
                for name in counts
            }
            steps[setting].append(json.loads(line) | {"sent": sent})
        setting = next(upcoming)
        roles = {name: roles_of(host) for name, host in hosts.hosts.items()}
        for host in hosts.hosts.values():
            host.throttle(setting[0])
        before = {name: host.bytes() for name, host in hosts.hosts.items()}
        driver.stdin.write("forward\n" if setting[1] else "as it is\n")
        driver.stdin.flush()
    late.cancel()
    if driver.wait(60) or len(steps[PLAN[-1]]) < ROUNDS:
        raise OSError(f"{size}: the run ended with exit code {driver.returncode} in {setting}")
    return [
        {
            "what": size,
            "megabits": mbits,
            "forward": forward,
            "tokens": mean(step["rollout/tokens"] for step in these),
            "received_and_sent": {
                name: [mean(step["sent"][name][way] for step in these) for way in (0, 1)] for name in roles
            },
            "roles": roles,
            "seconds": median(step["time/step"] for step in these),
            "stages": {k[5:]: median(s[k] for s in these) for k in these[0] if k.startswith("time/")},
            "each_s": [round(step["time/step"], 3) for step in these],
            "timed": timed,
            "controller_added_mib": median(step["added_mib"] for step in these),
        }
        for (mbits, forward), these in ((setting, found[-ROUNDS:]) for setting, found in steps.items())
    ]


def main() -> None:
    end_cleanly()
    results, timed = Path(sys.argv[1]), "--beside-others" not in sys.argv
    wanted = [size for size in sys.argv[2:] if size in SIZES] or [*SIZES]
    lines = results.read_text().splitlines() if results.exists() else []
    done = {json.loads(line)["what"] for line in lines}

    with tempfile.TemporaryDirectory() as name:
        save_student(Path(name) / "student")
        save_teacher(Path(name) / "teacher", seed=1, **MODEL)
        workers = {f"worker{number}": 1 for number in range(4)}
        for cpus, sizes in ((HOSTS, [*SIZES][:-1]), ({"controller": 0, **workers}, [BY_ROLE])):
            if not (rest := [size for size in sizes if size in wanted and size not in done]):
                continue
            with RayHosts(cpus, [Path(name)], env=REPORTS) as hosts:
                for size in rest:
                    rows = measure(hosts, Path(name), size, timed)
                    with results.open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in rows)
                    print(json.dumps(rows, indent=1), flush=True)


if __name__ == "__main__":
    main()
