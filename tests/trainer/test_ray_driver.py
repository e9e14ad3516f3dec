"""A run with a cluster of its own: kill -9 of the driver, Ctrl-C twice, and its own end leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from practicum.trainer.run import train_loaded
from tests.cluster import descendants, still_running

from . import kill_orders
from .recipes import tiny
from .test_ray import assert_same_run
from .test_ray_failures import MORTAL, fragile

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@contextmanager
def driver(folder: Path, *more: str) -> Iterator[subprocess.Popen[Any]]:
    """A run in a process of its own, in a session of its own as if a terminal had started it."""
    options = ["--set", "runtime.cpus=6", "--out", str(folder / "cut")]
    command = [sys.executable, "-m", "practicum", "train", str(folder / "recipe.yaml"), *options, *more]
    with (folder / "output.txt").open("a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)


def until(ordered: Path, process: subprocess.Popen[Any]) -> None:
    """Wait for a sign of the run."""
    deadline = time.monotonic() + 240
    while not ordered.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ordered.unlink()


def test_a_run_that_started_its_cluster_leaves_nothing_however_it_ends_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    train_loaded(tiny(tmp_path, **MORTAL), tmp_path / "whole")
    (tmp_path / "orders").mkdir()
    monkeypatch.setenv(kill_orders.FOLDER, str(tmp_path / "orders"))
    lingers, shared = tmp_path / "orders" / "lingers", set(os.listdir("/dev/shm"))
    others, started = set(descendants()), dict[int, str]()
    tiny(tmp_path, **fragile(MORTAL))

    in_step_2 = kill_orders.order("linger at prompt 4")
    with driver(tmp_path) as process:
        until(lingers, process)
        started |= descendants()
        process.kill()
        killed = {pid: started[pid] for pid in started.keys() - others}
        assert len(killed) > 10
        assert not still_running(killed, seconds=10)
    in_step_2.unlink()

    in_step_3 = kill_orders.order("linger at prompt 8")
    with driver(tmp_path, "--resume") as process:
        until(lingers, process)
        started |= descendants()
        for _ in range(2):  # as a terminal does: to all processes of the session
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(1)
        assert process.wait(timeout=60) != 0
    assert "stopped by a second SIGINT" in (tmp_path / "cut" / "log.txt").read_text()
    in_step_3.unlink()

    with driver(tmp_path, "--resume") as process:
        assert process.wait(timeout=240) == 0
    left = {pid: started[pid] for pid in started.keys() - others}
    assert len(left) > len(killed)
    assert not still_running(left)
    assert not set(descendants()) - others
    assert set(os.listdir("/dev/shm")) <= shared
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 1e-6)
