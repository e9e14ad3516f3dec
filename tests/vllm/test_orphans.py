"""However a training run ends, no process of it is left: seen in the process table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.vllm.models import MAKE, arguments, await_true, descendants, still_there

RECIPE: dict[str, Any] = {
    "name": "tiny",
    "model": {"random_init": MAKE},
    "tasks": {"sort": {"kind": "sort"}},
    "rollout": {"samples": 2, "max_new_tokens": 8, "max_num_seqs": 8, "engine": "vllm"},
    "train": {"steps": 100_000, "prompts": 4},
}
GONE_S = 20.0
"""How long what a killed run leaves behind may take to end by itself."""


@dataclass
class Run:
    """`practicum train` with a vLLM engine, in a session and process group of its own."""

    process: subprocess.Popen[str]
    out: Path
    seen: set[int] = field(default_factory=set)
    """All processes that it had whenever somebody looked."""

    def look(self) -> set[int]:
        self.seen |= {self.process.pid, *descendants(self.process.pid), *session_of(self.process.pid)}
        return self.seen

    def starts(self) -> bool:
        """Whether vLLM's process is there."""
        assert self.process.poll() is None, self.end()
        return any("vLLM" in arguments(pid) or "spawn_main" in arguments(pid) for pid in self.look())

    def steps(self) -> bool:
        """Whether a step was done."""
        assert self.process.poll() is None, self.end()
        self.look()
        written = self.out / "metrics.jsonl"
        return written.exists() and written.stat().st_size > 0

    def end(self) -> tuple[int, str]:
        """Its exit code and what it said, after it has ended by itself."""
        said = "".join(self.process.communicate(timeout=120))
        return self.process.returncode, said

    def left(self) -> dict[int, str]:
        """Its processes that are still there, with their arguments."""
        there = still_there(self.seen | session_of(self.process.pid))
        return {pid: arguments(pid) for pid in there}

    def gone(self) -> None:
        """No engine is left, and a moment later nothing at all.

        What multiprocessing keeps beside ends after the run; a process that ends has no arguments any more.
        """
        engines = {pid: told for pid, told in self.left().items() if told and "resource_tracker" not in told}
        assert engines == {}
        await_true(lambda: not self.left(), 10)


def session_of(leader: int) -> set[int]:
    """Return the processes of a session, also those whose parents have gone."""
    found = set()
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended
            if os.getsid(pid) == leader:
                found.add(pid)
    return set(still_there(found))


@contextmanager
def training(folder: Path, **sections: Any) -> Iterator[Run]:
    """A run that is over at the end, whatever happens."""
    recipe, out = folder / "tiny.yaml", folder / "run"
    recipe.write_text(yaml.safe_dump(RECIPE | sections))
    process = subprocess.Popen(
        [sys.executable, "-m", "practicum", "train", str(recipe), "--out", str(out)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    run = Run(process, out)
    try:
        yield run
    finally:
        for pid in run.left():
            os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_leaves_nothing(tmp_path: Path, fails: bool):
    (tmp_path / "unfair.py").write_text("def judge(*args, **more):\n    raise ArithmeticError('no reward')\n")
    reward = {"reward": {"functions": [{"use": "unfair:judge"}]}} if fails else {}
    with training(tmp_path, train={"steps": 2, "prompts": 4}, **reward) as run:
        await_true(run.starts)
        code, said = run.end()
        assert (code != 0) == fails, said
        assert ("no reward" in said) == fails
        assert "leaked" not in said
        run.gone()


@pytest.mark.parametrize("when", [Run.starts, Run.steps])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, when: Callable[[Run], bool]):
    with training(tmp_path) as run:
        await_true(lambda: when(run))
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
        _, said = run.end()
        run.gone()
        assert "Traceback" not in said, said


@pytest.mark.parametrize("when", [Run.starts, Run.steps])
def test_a_killed_run_leaves_nothing_after_some_seconds(tmp_path: Path, when: Callable[[Run], bool]):
    with training(tmp_path) as run:
        await_true(lambda: when(run))
        assert len(run.left()) > 1
        run.process.kill()
        await_true(lambda: not run.left(), GONE_S)
