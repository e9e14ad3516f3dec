"""Connect this process to a Ray cluster: start one here or join one, and disconnect again."""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from practicum.devices import count_cores, count_gpus
from practicum.errors import ClusterError, MissingExtraError
from practicum.processes.child_process import child_environment
from practicum.recipe.schema.runtime_section import Runtime
from practicum.runtime.ray.placement import GIB, Node

REACH_S = 5.0
"""Seconds in which a machine must accept a connection."""
HEALTH_S = 60.0
"""Seconds in which Ray's health check must answer; most of them go into starting its command."""
_ENV = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_HERE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",
    "RAY_task_events_report_interval_ms": "0",
}
"""For a cluster that is started here: it stays on 127.0.0.1, workers have this process's priority (by default
Ray gives them a lower one), and no list of all calls is kept for a dashboard, which there is not."""

_LIBRARIES = ("bin", "lib", "lib64")
"""Folders of a Python installation, which every machine has itself."""
_FOLDER = "PRACTICUM_FOLDER"
"""Tells workers the folder that the run was started in."""

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def connect(runtime: Runtime, env: Mapping[str, str]) -> Callable[[], None]:
    """Connect this process to the recipe's cluster; returns a function that disconnects.

    If this process is connected already, nothing is done. Processes of a cluster that is started here have
    `env`.
    """
    if is_connected(runtime):
        return lambda: None
    ray = import_ray()
    options = _join(runtime) if runtime.address is not None else _start(runtime)
    try:
        with child_environment(env if runtime.address is None else {}):
            ray.init(**options, **_QUIET)
    except BaseException as error:  # also Ctrl-C: nothing that was started may stay
        ray.shutdown()
        if not isinstance(error, Exception):
            raise
        what = "start Ray here" if runtime.address is None else f"join Ray at {runtime.address}"
        raise ClusterError(f"can't {what}: {error}") from error
    return ray.shutdown


def set_environment(runtime: Runtime) -> None:
    """Set what Ray reads from the environment; call this before Ray is imported."""
    for name, value in (_ENV | ({} if runtime.address else _HERE)).items():
        os.environ.setdefault(name, value)


def is_connected(runtime: Runtime) -> bool:
    """Whether this process is connected to a Ray already."""
    set_environment(runtime)
    return import_ray().is_initialized()


def workers_environment(threads: int) -> dict[str, str]:
    """For workers: their threads, this process's import paths for user modules, and its folder."""
    libraries = [Path(prefix) / name for prefix in (sys.prefix, sys.base_prefix) for name in _LIBRARIES]
    paths = [Path(path).absolute() for path in sys.path]
    user_paths = [str(path) for path in paths if not any(path.is_relative_to(lib) for lib in libraries)]
    return {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(user_paths)),
        _FOLDER: os.getcwd(),
    }


def enter_folder() -> None:
    """In a worker: enter the run's folder, if this machine has it, so that relative paths mean the same."""
    folder = os.environ.get(_FOLDER)
    if folder is not None and Path(folder).is_dir():
        os.chdir(folder)


def import_ray() -> Any:
    """The module ray, or the command that installs it."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("runtime.kind: ray", "ray") from None
    return ray


def this_machine(runtime: Runtime) -> Node:
    """What a cluster that is started here would have."""
    store = float("inf") if runtime.object_store_gb is None else runtime.object_store_gb * GIB
    return Node("this machine", float(runtime.cpus or count_cores()), float(count_gpus()), object_store=store)


def read_nodes() -> tuple[list[Node], list[Node]]:
    """The cluster's machines twice: with what is free on them, and with all they have."""
    ray = import_ray()
    if ray.util.client.ray.is_connected():  # only a process in the cluster can ask
        task = ray.remote(_read_nodes).options(num_cpus=0)
        return ray.get(task.remote(), timeout=HEALTH_S)
    return _read_nodes()


def _read_nodes() -> tuple[list[Node], list[Node]]:
    import ray
    from ray._private.state import available_resources_per_node  # Ray has no public way by node

    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [_node(n, free.get(n["NodeID"], {})) for n in alive], [_node(n, n["Resources"]) for n in alive]


def _node(node: dict[str, Any], has: dict[str, float]) -> Node:
    numbers = (has.get(key, 0.0) for key in ("CPU", "GPU", "memory", "object_store_memory"))
    return Node(node["NodeManagerAddress"], *numbers, id=node["NodeID"])


def _start(runtime: Runtime) -> dict[str, Any]:
    options: dict[str, Any] = {"address": "local", "include_dashboard": False}
    options |= {"num_cpus": runtime.cpus or count_cores(), "_node_ip_address": "127.0.0.1"}
    if runtime.object_store_gb is not None:
        options["object_store_memory"] = int(runtime.object_store_gb * GIB)
    return options


def _join(runtime: Runtime) -> dict[str, Any]:
    """Options of ray.init, after a check that the cluster answers: Ray itself would wait for minutes."""
    address = _resolve(runtime.address or "")
    scheme, _, place = address.rpartition("://")
    host, colon, port = place.rpartition(":")
    if scheme not in ("", "ray") or not colon or not port.isdigit():
        expected = "auto, host:port or ray://host:10001"
        raise ClusterError(f"runtime.address: found {runtime.address!r}, expected {expected}")
    if scheme and importlib.util.find_spec("grpc") is None:
        raise ClusterError(f"runtime.address {address} needs Ray's client: pip install 'ray[client]'")
    timeout = min(REACH_S, runtime.start_s)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except OSError as error:
        reason = (error.strerror or str(error) or "no answer").lower()
        raise ClusterError(
            f"nobody takes connections at {address} (runtime.address): {reason}\n"
            "  → start Ray there with `ray start --head`, whose output names the address; or remove "
            "runtime.address to start a cluster on this machine"
        ) from None
    if not scheme:
        _require_health(address, min(HEALTH_S, runtime.start_s))
    return {"address": address}


def _resolve(address: str) -> str:
    """The address that `auto` means."""
    if address != "auto":
        return address
    import_ray()
    from ray._private.services import get_ray_address_from_environment  # what ray.init would ask

    try:
        return get_ray_address_from_environment("auto", None)
    except ConnectionError:
        advice = "start one with `ray start --head`, or remove runtime.address"
        raise ClusterError(
            f"runtime.address is auto, and no Ray runs on this machine\n  → {advice}"
        ) from None


def _require_health(address: str, timeout: float) -> None:
    """Raise unless Ray listens there; checked in its own process, which may hang without harm."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"what listens at {address} does not answer as Ray in {timeout:g} s") from None
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or "its health check failed"
        raise ClusterError(f"what listens at {address} is not a healthy Ray: {reason}")
