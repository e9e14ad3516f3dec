"""Check before a start that every host of a cluster has the packages, models and run folder of a run."""

from __future__ import annotations

import fcntl
import importlib.metadata
import platform
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from practicum.errors import ClusterError
from practicum.processes.host import START_S
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.ray.actor_calls import ask

_PACKAGES = ("practicum", "torch", "transformers")
"""Packages whose version must be the same on every host."""
_SIOCGIFADDR = 0x8915


def check_hosts(recipe: Recipe, folder: Path | None) -> None:
    """Raise a ClusterError that names each host on which workers would fail. A cluster of one host passes."""
    hosts = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    here = ray.get_runtime_context().get_node_id()
    if all(node["NodeID"] == here for node in hosts):
        return
    frozen = [*recipe.teachers.values(), *recipe.reward.models.values()]
    named = [recipe.model.path, recipe.algorithm.kl.reference]
    named += [path for model in frozen for path in (model.model, getattr(model, "adapter", None))]
    models = [str(Path(path).absolute()) for path in named if path is not None and Path(path).exists()]
    describe, calls = ray.remote(_describe), []
    with NamedTemporaryFile(prefix=".host-check-", dir=folder) as marker:
        paths = [*dict.fromkeys(models), *([] if folder is None else [marker.name])]
        for node in hosts:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            calls.append(describe.options(num_cpus=0, scheduling_strategy=place).remote(paths))
        names = [node["NodeManagerAddress"] for node in hosts]
        try:
            answers = ask(calls, timeout=START_S, owner="the check of all hosts", who=names)
        except RayError as error:  # Ray had not noticed its end when it listed the hosts
            note = next(iter(getattr(error, "__notes__", ())), "")
            lost = f"a host left the cluster while all were checked ({note}): see `ray status`, and try again"
            raise ClusterError(lost) from error
    versions = _versions()
    problems = []
    for name, (found, missing) in zip(names, answers, strict=True):
        differ = [f"{k} {found.get(k)} (here {v})" for k, v in versions.items() if found.get(k) != v]
        problems += [f"{name} has {', '.join(differ)}: install the same versions"] if differ else []
        for path in missing:
            what, shown = ("run folder", folder) if path == marker.name else ("model", path)
            problems.append(f"{name} does not have the {what} {shown}: use a shared file system")
    if problems:
        raise ClusterError(
            "hosts of the cluster can't run this recipe:\n" + "\n".join(f"• {p}" for p in problems)
        )


def interface_of(address: str) -> str | None:
    """Return the network interface with this IPv4 address, or None. Without it gloo takes the address of the
    host's name, which on many hosts is a loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def _versions() -> dict[str, str]:
    return {"Python": platform.python_version()} | {k: importlib.metadata.version(k) for k in _PACKAGES}


def _describe(paths: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return this host's versions, and which of these paths it does not have."""
    return _versions(), [path for path in paths if not Path(path).exists()]
