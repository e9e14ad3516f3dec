"""TransferQueue's processes: its controller and storage units, started, watched and ended here."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from practicum.compat.transferqueue import prepare_import, server_classes, storage_options
from practicum.errors import DeadlineError, RecipeError, StoreError

# One thread for torch in the servers: more than the cores is a warning on every call.
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
    address: bytes
    """Pickled: the controller's address, and the options of the storage."""

    def actors(self) -> dict[str, Any]:
        """Return the actors by the names that errors use."""
        units = {f"storage unit {i}": unit for i, unit in enumerate(self.units)}
        return {"controller": self.controller, **units}

    def death(self) -> str | None:
        """Return which process died and what that means, or None if all are alive as far as Ray knows."""
        return self._look()[0]

    def silence(self) -> str | None:
        """Return which processes do not answer without being dead, or None if all answer."""
        _, silent = self._look()
        names = " and ".join(f"TransferQueue's {name}" for name in silent)
        return f"{names} gave no sign of life for {_CHECK_S:g} s" if silent else None

    def _look(self) -> tuple[str | None, list[str]]:
        """Return the first death, as a message, and who does not answer."""
        calls = {name: actor.get_zmq_server_info.remote() for name, actor in self.actors().items()}
        answered, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_CHECK_S)
        silent = [name for name, ref in calls.items() if ref not in answered]
        death = None
        for name in [name for name in calls if name not in silent]:
            try:
                ray.get(calls[name])
            except ActorUnavailableError:  # Ray can't connect to it: it hangs, or its node is cut off
                silent.append(name)
            except RayActorError:
                lost = "its rows are lost" if name != "controller" else "rows can't be located any more"
                after = f"{lost}: resume the run from its last checkpoint"
                death = death or f"TransferQueue's {name} died; {after}"
        return death, silent

    def close(self) -> None:
        for actor in self.actors().values():
            ray.kill(actor)
        remove_placement_group(self.room)


def start_servers(units: int, *, timeout_s: float) -> Servers:
    """Start the controller and `units` storage units; all are up when it returns."""
    prepare_import(timeout_s)
    room, options = _reserve(units), storage_options(units)
    controller_class, unit_class = server_classes()
    started: list[Any] = []

    def start(remote_class: Any, **arguments: Any) -> None:
        where = PlacementGroupSchedulingStrategy(room, placement_group_bundle_index=len(started))
        actor = remote_class.options(num_cpus=1, scheduling_strategy=where, max_restarts=0, runtime_env=_ENV)
        started.append(actor.remote(**arguments))

    try:
        # With polling_mode a request that finds nothing is answered immediately; without it, the controller
        # sleeps, and all its clients wait.
        start(controller_class, polling_mode=True)
        for _ in range(units):
            start(unit_class, config=options)
        controller, *stores = ray.get(
            [actor.get_zmq_server_info.remote() for actor in started], timeout=timeout_s
        )
    except BaseException as error:
        for actor in started:
            ray.kill(actor)
        remove_placement_group(room)
        if isinstance(error, GetTimeoutError):
            raise DeadlineError(
                f"TransferQueue's controller and {units} storage units were not up after {timeout_s:g} s: "
                "the cluster is very busy, or runtime.start_s is too short"
            ) from None
        if isinstance(error, RayActorError):
            raise StoreError(f"TransferQueue did not start: {error}") from error
        raise
    address = pickle.dumps((controller, options | {"zmq_info": {info.id: info for info in stores}}))
    return Servers(uuid4().hex, started[0], tuple(started[1:]), room, address)


def _reserve(units: int) -> PlacementGroup:
    """Reserve a CPU for the controller and for each unit; a RecipeError if the cluster has too few."""
    total = ray.cluster_resources().get("CPU", 0.0)
    if total >= 1 + units:
        room = placement_group([{"CPU": 1.0}] * (1 + units), strategy="SPREAD")
        if room.wait(_ROOM_S):
            return room
        remove_placement_group(room)
    free = ray.available_resources().get("CPU", 0.0)
    raise RecipeError(
        "runtime.store",
        f"transferqueue, whose {1 + units} processes want a free CPU each",
        f"no more than the cluster has: free {free:g} CPUs, of {total:g} CPUs",
        "add machines, or set runtime.store to ray, which needs no CPU",
    )
