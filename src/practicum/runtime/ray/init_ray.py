"""Connect this process to a Ray cluster: start one on this machine or join one, and disconnect.

Ray's server processes end with a driver that is killed, but its agents stay for a minute. A watchdog process
ends them: it waits for the end of a pipe that only the driver holds.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from practicum.devices import count_cores
from practicum.errors import ClusterError, MissingExtraError
from practicum.recipe.schema.runtime_section import Runtime

REACH_S = 5.0
"""Seconds in which a machine must accept a connection."""
HEALTH_S = 60.0
"""Seconds in which Ray's health check must answer; most of them go into starting its command."""
_EVENTS = "RAY_task_events_report_interval_ms"
_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", _EVENTS: "0"}
"""For every cluster: processes of the run don't report each of their calls to Ray's head, for a dashboard."""
_HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
"""For a cluster that is started here: it stays on 127.0.0.1, and workers have this process's priority."""
_LIBRARIES = ("bin", "lib", "lib64")
"""Folders of a Python installation, which every machine has itself."""
_FOLDER = "PRACTICUM_FOLDER"
"""The variable that tells workers the folder in which the run was started."""


def import_ray() -> Any:
    """Return the module ray, or raise an error with the command that installs it."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("runtime.kind: ray", "ray") from None
    return ray


def set_environment(runtime: Runtime) -> None:
    """Set what Ray reads from the environment. Call this before Ray is imported."""
    for name, value in (_ENV | ({} if runtime.address else _HERE)).items():
        os.environ.setdefault(name, value)


def connect(runtime: Runtime, env: Mapping[str, str]) -> Callable[[], None]:
    """Connect this process to the recipe's cluster. Return a function that disconnects. Do nothing if this
    process is connected already. Processes of a cluster that is started here have `env`."""
    set_environment(runtime)
    ray, starts = import_ray(), runtime.address is None
    if ray.is_initialized():
        return lambda: None
    options, others = _start(runtime) if starts else _join(runtime), _descendants()
    before = dict(os.environ)
    try:
        os.environ.update(env if starts else {})
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        started = {pid: since for pid, since in _descendants().items() if pid not in others}
        watchdog = _watchdog(started) if starts else ExitStack()
    except BaseException as error:  # also Ctrl-C: nothing that was started may stay
        ray.shutdown()
        if not isinstance(error, Exception):
            raise
        what = "start Ray here" if starts else f"join Ray at {runtime.address}"
        raise ClusterError(f"can't {what}: {error}") from error
    finally:
        for name in env if starts else ():
            os.environ.pop(name)
            os.environ.update({name: before[name]} if name in before else {})

    def disconnect() -> None:
        with watchdog:
            ray.shutdown()

    return disconnect


def workers_environment(threads: int) -> dict[str, str]:
    """Return the workers' threads, this process's import paths of user modules, and its folder."""
    libraries = [Path(prefix) / name for prefix in (sys.prefix, sys.base_prefix) for name in _LIBRARIES]
    paths = [Path(path).absolute() for path in sys.path]
    user_paths = [str(path) for path in paths if not any(path.is_relative_to(lib) for lib in libraries)]
    return {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(user_paths)),
        _FOLDER: os.getcwd(),
        _EVENTS: os.environ.get(_EVENTS, _ENV[_EVENTS]),
    }


def enter_folder() -> None:
    """In a worker: enter the run's folder if this machine has it, so that relative paths mean the same."""
    folder = os.environ.get(_FOLDER)
    if folder is not None and Path(folder).is_dir():
        os.chdir(folder)


def _start(runtime: Runtime) -> dict[str, Any]:
    from practicum.compat.ray import LOCAL_ONLY

    options = {"address": "local", "include_dashboard": False, "num_cpus": runtime.cpus or count_cores()}
    return options | LOCAL_ONLY


def _join(runtime: Runtime) -> dict[str, Any]:
    """Return the options of ray.init, once the cluster answers: Ray itself would wait for minutes."""
    address = runtime.address or ""
    if address == "auto":
        return {"address": address}
    scheme, _, place = address.rpartition("://")
    host, colon, port = place.rpartition(":")
    if scheme not in ("", "ray") or not colon or not port.isdigit():
        expected = "auto, host:port or ray://host:10001"
        raise ClusterError(f"runtime.address: found {address!r}, expected {expected}")
    if scheme and importlib.util.find_spec("grpc") is None:
        raise ClusterError(f"runtime.address {address} needs Ray's client: pip install 'ray[client]'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        reason = (error.strerror or str(error) or "no answer").lower()
        raise ClusterError(
            f"can't connect to {address} (runtime.address): {reason}\n"
            "  → start Ray there with `ray start --head`, whose output names the address; or remove "
            "runtime.address to start a cluster on this machine"
        ) from None
    if not scheme:
        _require_health(address, HEALTH_S)
    return {"address": address}


def _require_health(address: str, timeout: float) -> None:
    """Raise a ClusterError unless Ray listens there. The check runs in a process that can be killed."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"the server at {address} did not respond like Ray within {timeout:g} s") from None
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or "its health check failed"
        raise ClusterError(f"the server at {address} is not a healthy Ray: {reason}")


def _descendants() -> dict[int, str]:
    """Return the processes that this one started, directly or not, with their start times (Linux only)."""
    parents: dict[int, tuple[int, str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            values = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(values[1]), values[19]
    found: dict[int, str] = {}
    generation = {os.getpid()}
    while generation:
        children = {pid: since for pid, (parent, since) in parents.items() if parent in generation}
        found |= children
        generation = set(children)
    return found


_WATCHDOG = """
import os, sys
sys.stdin.read()
for process in sys.argv[1:]:
    pid, since = process.split(":")
    try:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[19] == since:
                os.kill(int(pid), 9)
    except OSError:
        pass
"""
"""Waits until the driver has closed the pipe or died, then ends what is left of these processes."""


def _watchdog(processes: Mapping[int, str]) -> subprocess.Popen[Any]:
    """Start a process that ends these processes once this one has died."""
    listed = [f"{pid}:{since}" for pid, since in processes.items()]
    command = [sys.executable, "-S", "-E", "-c", _WATCHDOG, *listed]
    quiet: Any = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    # A separate session: a signal to all processes of the driver's terminal does not reach it.
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **quiet)
