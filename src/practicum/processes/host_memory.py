"""Memory of this machine and of this process, as Linux tells it; None elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LINUX = sys.platform == "linux"
_SELF = Path("/proc/self")


def available_memory() -> int | None:
    """Bytes that processes may still take: the machine's, or less in a container with a limit."""
    if not _LINUX:
        return None
    found = _read_kib(Path("/proc/meminfo"), "MemAvailable")
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return found
    return limit - used if found is None else min(found, limit - used)


def peak_resident_memory() -> int | None:
    """Most bytes of this process that were in memory at once, since `reset_peak`."""
    return _read_kib(_SELF / "status", "VmHWM") if _LINUX else None


def reset_peak() -> None:
    """Begin to count `peak_resident_memory` anew, where the system lets a process do so."""
    if _LINUX:
        try:
            (_SELF / "clear_refs").write_text("5")
        except OSError:
            return


@contextmanager
def at_most(more: int | None) -> Iterator[None]:
    """Inside, this process may take this many bytes more: then an allocation is an error in Python, where
    otherwise the system would end the process. None is no limit."""
    used = _read_kib(_SELF / "status", "VmData") if _LINUX else None
    if more is None or used is None:
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + more if before[1] == resource.RLIM_INFINITY else min(used + more, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _read_kib(path: Path, name: str) -> int | None:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None
