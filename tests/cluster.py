"""A real Ray cluster on loopback, for the tests that need one."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # or they starve beside the other tests
}


@contextmanager
def local_ray(cpus: int = 8, object_store_mb: int = 300) -> Iterator[None]:
    """A cluster with this many logical CPUs, more than the machine's if need be; gone at the end. For
    fixtures of modules: a start takes seconds, and the tests of a file run in one process."""
    import ray

    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=object_store_mb * 2**20,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        started = descendants()
        ray.shutdown()
        left = still_running(started)
    assert not left, f"processes that the cluster left behind: {left}"


def descendants() -> dict[int, str]:
    """The processes that this one started, directly or not: pid and start time with command."""
    processes = {int(p.name): stat for p in Path("/proc").glob("[0-9]*") if (stat := _stat(p))}
    found: dict[int, str] = {}
    parents = {os.getpid()}
    while parents:
        children = {pid: stat for pid, stat in processes.items() if int(stat[1]) in parents}
        found |= {pid: _identity(stat) for pid, stat in children.items() if not _lasting(stat)}
        parents = set(children) - {os.getpid()}
    return found


def still_running(processes: dict[int, str], seconds: float = 20.0) -> dict[int, str]:
    """Those that are alive after so long; an ended one that nobody has waited for is not."""
    deadline = time.monotonic() + seconds
    while True:
        left = {}
        for pid, identity in processes.items():
            stat = _stat(Path(f"/proc/{pid}"))
            if stat is not None and stat[0] != "Z" and _identity(stat) == identity:
                left[pid] = identity
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _stat(process: Path) -> list[str] | None:
    """State, parent, … as the kernel tells them, the command last."""
    try:
        text = (process / "stat").read_text()
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None
    return [*text.rpartition(")")[2].split(), command]


def _lasting(stat: list[str]) -> bool:
    """Python's helper that lives as long as a process that spawned others."""
    return "multiprocessing.resource_tracker" in stat[-1]


def _identity(stat: list[str]) -> str:
    return f"started at {stat[19]}"
