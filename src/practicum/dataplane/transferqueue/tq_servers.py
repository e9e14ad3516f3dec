"""TransferQueue's processes: its controller and storage units, started, watched and ended here.

They are started one by one, not by `tq.init()`: it hangs on a cluster that is too small, uses fixed names, so
that a second run would join the first, and has no deadline.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from practicum.errors import DeadlineError, RecipeError, StoreError

SIMPLE = "SimpleStorage"
# What each other backend is installed with: a Python module, and what people install.
_MODULES = {"MooncakeStore": ("mooncake", "mooncake-transfer-engine"), "Yuanrong": ("yr", "openyuanrong")}
# One thread for torch in the servers: more than there are cores is a warning on every call.
_ENV = {"env_vars": {"TQ_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}}
_ROOM_S = 5.0
"""CPUs of what has just ended may be free again within this many seconds."""
_CHECK_S = 5.0


@dataclass(frozen=True, slots=True)
class Servers:
    """TransferQueue's processes; can be pickled to actors that have not imported TransferQueue."""

    uid: str
    controller: Any
    units: tuple[Any, ...]
    room: PlacementGroup
    backend: str
    address: bytes

    def opened(self) -> tuple[Any, dict[str, Any]]:
        """What a client of TransferQueue needs: where the controller is, and the backend's options."""
        return pickle.loads(self.address)

    def actors(self) -> dict[str, Any]:
        """By the names that errors use."""
        units = {f"storage unit {i}": unit for i, unit in enumerate(self.units)}
        return {"controller": self.controller, **units}

    def death(self) -> str | None:
        """Which process died, and what that means; None if all are alive as far as Ray knows."""
        return self._look()[0]

    def silence(self) -> str | None:
        """Which processes do not answer, without being dead; None if all do."""
        _, silent = self._look()
        names = " and ".join(f"TransferQueue's {name}" for name in silent)
        return f"{names} gave no sign of life for {_CHECK_S:g} s" if silent else None

    def _look(self) -> tuple[str | None, list[str]]:
        """The first death, in words, and who does not answer."""
        calls = {name: actor.get_zmq_server_info.remote() for name, actor in self.actors().items()}
        answered, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_CHECK_S)
        silent = [name for name, ref in calls.items() if ref not in answered]
        death = None
        for name, ref in calls.items():
            if name in silent:
                continue
            try:
                ray.get(ref)
            except ActorUnavailableError:  # Ray can't connect to it: it hangs, or its node is cut off
                silent.append(name)
            except RayActorError:
                lost = "its rows are lost" if name != "controller" else "rows can't be located any more"
                after = f"{lost}: resume the run from its last checkpoint"
                death = death or f"TransferQueue's {name} died; {after}"
        return death, silent

    def close(self) -> None:
        """End all of them."""
        for actor in self.actors().values():
            ray.kill(actor)
        remove_placement_group(self.room)


def start_servers(
    units: int, backend: str, options: Mapping[str, Any] | None, *, unit_gb: float = 0.0, timeout_s: float
) -> Servers:
    """Start the controller and, for SimpleStorage, `units` storage units; all are up when it returns."""
    prepare_import(timeout_s)
    chosen = _backend_options(backend, options)
    room = _reserve(units, units if backend == SIMPLE else 0, unit_gb)
    # Imported late: it takes seconds, and nothing of it is needed to refuse.
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    started: list[Any] = []
    try:
        # With polling_mode a request that finds nothing is answered at once; without it, the controller
        # sleeps, and all its clients wait.
        started.append(_actor(TransferQueueController, room, 0).remote(polling_mode=True))
        config = {**chosen, "num_data_storage_units": units}
        for place in range(1, room.bundle_count):
            started.append(_actor(SimpleStorageUnit, room, place).remote(config=config))
        controller, *stores = _await_start(started, timeout_s)
    except BaseException:
        for actor in started:
            ray.kill(actor)
        remove_placement_group(room)
        raise
    if backend == SIMPLE:
        chosen["zmq_info"] = {info.id: info for info in stores}
    address = pickle.dumps((controller, chosen))
    return Servers(uuid4().hex, started[0], tuple(started[1:]), room, backend, address)


def prepare_import(timeout_s: float) -> None:
    """Set what TransferQueue reads from the environment when it is imported, unless it is set.

    A request to a storage unit is tried three times within our deadline. TransferQueue ignores it when the
    controller does not confirm a put in time, so the time for that is longer than our own deadline.
    """
    os.environ.setdefault("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", str(max(1, int(timeout_s / 3))))
    os.environ.setdefault("TQ_DATA_UPDATE_RESPONSE_TIMEOUT", str(int(10 * timeout_s) + 1))


def _reserve(units: int, actors: int, unit_gb: float) -> PlacementGroup:
    """Room for the controller and the units' actors, a CPU each; refused if there is none."""
    if units < 1:
        raise RecipeError("runtime.store.units", f"{units}", "1 or more")
    total, unit_bytes = ray.cluster_resources(), unit_gb * 2**30
    if total.get("CPU", 0.0) >= 1 + actors and total.get("memory", 0.0) >= unit_bytes * actors:
        unit = {"CPU": 1.0} | ({"memory": unit_bytes} if unit_bytes else {})
        room = placement_group([{"CPU": 1.0}, *[unit] * actors], strategy="SPREAD")
        if room.wait(_ROOM_S):
            return room
        remove_placement_group(room)
    free = ray.available_resources()
    cpus, memory = (f"{amounts.get('CPU', 0.0):g} CPUs and {_gib(amounts)}" for amounts in (free, total))
    raise RecipeError(
        "runtime.store.units",
        f"{units}, which with TransferQueue's controller want {1 + actors} free CPUs and "
        f"{unit_gb * actors:.1f} GiB of memory",
        f"no more than the cluster has: free {cpus}, of {memory}",
        "ask for fewer units or less unit_gb, or more machines; runtime.store.kind: ray wants none",
    )


def _gib(resources: Mapping[str, float]) -> str:
    return f"{resources.get('memory', 0.0) / 2**30:.1f} GiB"


def _actor(remote_class: Any, room: PlacementGroup, place: int) -> Any:
    where = PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=place)
    return remote_class.options(num_cpus=1, scheduling_strategy=where, max_restarts=0, runtime_env=_ENV)


def _backend_options(backend: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The backend's options over TransferQueue's defaults; a backend that is not there is refused."""
    if backend != SIMPLE:
        if backend not in _MODULES:
            raise RecipeError(
                "runtime.store.backend", repr(backend), " or ".join(map(repr, (SIMPLE, *_MODULES)))
            )
        module, package = _MODULES[backend]
        if importlib.util.find_spec(module) is None:
            raise RecipeError(
                "runtime.store.backend",
                f"{backend!r}, whose Python module {module!r} is not installed",
                f"a backend that is installed on every node, like {SIMPLE!r}",
                f"pip install {package}",
            )
    from importlib import resources

    from omegaconf import OmegaConf

    defaults = OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml"))
    plain = OmegaConf.to_container(defaults.backend[backend], resolve=True)
    assert isinstance(plain, dict)
    # A backend's own servers are the user's: TransferQueue would kill those of other runs first.
    plain = {str(name): value for name, value in plain.items()} | {"auto_init": False}
    for name in options or {}:
        if name not in plain:
            raise RecipeError(
                f"runtime.store.options.{name}", "an unknown option", " or ".join(map(repr, plain))
            )
    return plain | dict(options or {})


def _await_start(actors: list[Any], timeout_s: float) -> list[Any]:
    try:
        return ray.get([actor.get_zmq_server_info.remote() for actor in actors], timeout=timeout_s)
    except GetTimeoutError:
        raise DeadlineError(
            f"TransferQueue's controller and {len(actors) - 1} storage units were not up after "
            f"{timeout_s:g} s: the cluster is very busy, or runtime.start_s is too short"
        ) from None
    except RayActorError as error:
        raise StoreError(f"TransferQueue did not start: {error}") from error
