"""Record the numbers of small runs of every kind before a refactoring, and compare them after it.

python -m tests.numbers DIR                  # train every run into DIR
python -m tests.numbers DIR --against OLD    # and compare them with an older DIR, bit for bit
python -m tests.numbers DIR --only lag,ppo
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import practicum as pr
from tests.cluster import ENV

os.environ.update(ENV, OMP_NUM_THREADS="1")

SMALL = {"hidden": 32, "layers": 2, "heads": 2, "context": 128}
TASKS = {
    "copy": {"kind": "copy", "options": {"length": [1, 2], "letters": 3}},
    "compare": {"kind": "compare"},
}
BASE: dict[str, Any] = {
    "seed": 3,
    "model": {"path": "supervised/export"},
    "tasks": TASKS,
    "rollout": {"samples": 4, "max_new_tokens": 6, "max_num_seqs": 16},
    "train": {"steps": 3, "prompts": 6, "minibatches": 2, "lr": 1e-3},
    "eval": {"rows": 8},
    "runtime": {"threads": 1},
}
SUPERVISED = {
    "algorithm": {"loss": "supervised", "advantage": "none"},
    "train": {"steps": 60, "prompts": 32, "lr": 5e-3},
}
TEACHERS = {"copy": {"model": "grpo/export"}, "compare": {"model": "ppo/export"}}
PURE = {"reward": {"weight": 0.0}}
PICTURES = {
    "dots": {"kind": "dots", "options": {"pictures": [1, 2], "size": [12, 24]}},
    "copy": TASKS["copy"],
}
RAY = {"runtime": {"kind": "ray", "cpus": 8, "threads": 1}, "pools": {"train": {"nodes": 1, "devices": 2}}}
TOTAL = {"total": {"kind": "total", "chat": True, "options": {"numbers": [3, 3], "digits": [1, 2]}}}
AGENT = {
    "tasks": TOTAL,
    "agent": {
        "loop": "compress", "tools": ["calculator"], "tool_call_format": "plain", "turns": 4,
        "compress_at": 44, "message": "what is left?",
    },
}  # fmt: skip

RUNS: dict[str, dict[str, Any]] = {
    "supervised": {**SUPERVISED, "model": {"random_init": SMALL}},
    "grpo": {"algorithm": {"entropy": 0.01, "kl": {"place": "loss"}}},
    "ppo": {
        "algorithm": {"advantage": "gae", "lam": 0.95},
        "critic": {},
        "train": {**BASE["train"], "epochs": 2},
    },
    "gspo": {
        "algorithm": {"loss": "gspo", "aggregation": "seq_mean_token_mean"},
        "eval": {"rows": 8, "every": 1},
    },
    "refills": {"refills": 4},
    "remax": {"algorithm": {"advantage": "remax"}},
    "lag": {"rollout": {**BASE["rollout"], "lag": 1}, "train": {**BASE["train"], "steps": 5}},
    "mopd": {"teachers": TEACHERS, "route": {"by": "domain"}, "distill": {"signal": "full"}},
    "top_k": {"teachers": {"t": {"model": "ppo/export"}}, "distill": {"signal": "top_k", "top_k": 4}, **PURE},
    "own": {
        "teachers": {"t": {"model": "ppo/export", "placement": "own"}},
        "distill": {"signal": "sampled", "divergence": "k1_straight"},
        **PURE,
    },
    "url": {
        "teachers": {"t": {"url": "URL", "model": "ppo"}},
        "distill": {"signal": "top_k", "top_k": 4},
        **PURE,
    },
    "copies": {
        "teachers": {"old": {"student": {"every": 2}}},
        "distill": {"signal": "sampled", "divergence": "k1_straight"},
    },
    "lora": {"model": {"path": "supervised/export", "lora": {"rank": 4}}},
    "adapters": {
        "model": {"path": "supervised/export", "lora": {"rank": 4}},
        "teachers": {"a": {"adapter": "lora"}},
        "distill": {"signal": "full"},
    },
    "chat": {**SUPERVISED, **AGENT, "model": {"random_init": SMALL}},
    "agent": {**AGENT, "model": {"path": "chat/export"}, "algorithm": {"entropy": 0.05}},
    "moe": {
        "model": {"random_init": {"family": "qwen3_moe", "experts": 4, **SMALL}},
        "tasks": {"copy": TASKS["copy"]},
        "algorithm": {"entropy": 0.05},
    },
    "vision": {
        "model": {"random_init": {"family": "qwen2_5_vl", **SMALL}},
        "tasks": PICTURES,
        "algorithm": {"entropy": 0.05},
    },
    "ray": {**RAY, "algorithm": {"advantage": "gae", "lam": 0.95}, "critic": {}},
    "ray_mopd": {
        **RAY,
        "pools": {"train": {"nodes": 1, "devices": 2}, "rollout": {"devices": 1}},
        "teachers": TEACHERS,
        "route": {"by": "domain"},
        "distill": {},
        "rollout": {**BASE["rollout"], "lag": 1},
    },
}


def train(folder: Path, name: str, **values: str) -> None:
    recipe = json.dumps({"name": name, **BASE, **RUNS[name]})
    for key, value in values.items():
        recipe = recipe.replace(f'"{key}"', f'"{value}"')
    path = folder / f"{name}.yaml"
    path.write_text(recipe)
    shutil.rmtree(folder / name, ignore_errors=True)
    pr.train(path, out=folder / name, quiet=True)


@contextmanager
def served(folder: Path, model: str) -> Iterator[str]:
    """Serve a trained model on loopback for the URL teacher."""
    command = [sys.executable, "-m", "practicum", "serve", model, "--port", "0", "--name", "ppo"]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if address := re.search(r"http://127.0.0.1:\d+(/v1)?", line):
                yield address[0].removesuffix("/v1") + "/v1"
                return
        raise SystemExit("serve did not start:\n" + "".join(lines))
    finally:
        process.terminate()
        process.wait(30)


def numbers(run: Path) -> dict[str, Any]:
    """Return what must not change: metrics without times, samples, and a hash of each weight file."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    weights = sorted((run / "export").glob("*.safetensors"))
    return {
        "metrics": [{k: v for k, v in line.items() if not _is_timing(k)} for line in lines],
        "samples": samples,
        "weights": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in weights},
    }


def _is_timing(metric: str) -> bool:
    parts = "time memory seconds tokens_per hidden overlap busy _s /s wait _gb mfu shared/decode"
    return any(part in metric for part in parts.split())


def differences(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Return one line for each kind of number that differs, with its first place."""
    found = [
        f"weights: {name}" for name in old["weights"] if new["weights"].get(name) != old["weights"][name]
    ]
    for kind in ("metrics", "samples"):
        if len(new[kind]) != len(old[kind]):
            found.append(f"{kind}: {len(new[kind])} lines, before {len(old[kind])}")
        seen = set()
        for number, (a, b) in enumerate(zip(new[kind], old[kind], strict=False)):
            for key in b | a:
                if a.get(key) != b.get(key) and key not in seen:
                    seen.add(key)
                    found.append(f"{kind}, line {number}: {key} {a.get(key)!r}, before {b.get(key)!r}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    names = arguments.only.split(",") if arguments.only else list(RUNS)
    different = 0
    for name in names:
        began = time.monotonic()
        if arguments.against and arguments.only:  # what it starts from is taken from the old runs
            for needed in ("supervised", "grpo", "ppo", "lora", "chat"):
                if not (folder / needed).exists() and needed != name:
                    shutil.copytree(arguments.against / needed, folder / needed)
        if name == "url":
            with served(folder, "ppo/export") as url:
                train(folder, name, URL=url)
        else:
            train(folder, name)
        result = numbers(folder / name)
        (folder / f"{name}.json").write_text(json.dumps(result))
        said = f"{name}: {time.monotonic() - began:.0f} s"
        if arguments.against:
            lines = differences(result, json.loads((arguments.against / f"{name}.json").read_text()))
            different += bool(lines)
            said += ", " + ("equal" if not lines else "DIFFERENT\n  " + "\n  ".join(lines[:12]))
        print(said, flush=True)
    print(f"{len(names)} runs, {different} different" if arguments.against else f"{len(names)} runs")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
