"""TransferQueue's processes, started, watched and ended here, and a process's client of them.

The client moves blobs of bytes in and out, with a deadline on every call.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from practicum.compat import transferqueue
from practicum.compat.ray import on_host
from practicum.errors import DeadlineError, RecipeError, StoreError

# One thread for torch in the servers: more than the cores is a warning on every call.
_ENV = {"env_vars": {"TQ_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}}
_ROOM_S = 5.0
"""CPUs of what has just ended may be free again within this many seconds."""
_SIGN_S = 5.0


@dataclass(frozen=True, slots=True)
class Servers:
    """TransferQueue's processes. It can be pickled to actors that have not imported TransferQueue."""

    uid: str
    controller: Any
    units: tuple[Any, ...]
    room: PlacementGroup
    address: bytes
    """Pickled: the controller's address, and the options of the storage."""

    def actors(self) -> dict[str, Any]:
        units = {f"storage unit {i}": unit for i, unit in enumerate(self.units)}
        return {"controller": self.controller, **units}

    def death(self) -> str | None:
        """Return which process died and what that means, or None if all are alive as far as Ray knows."""
        return self._look()[0]

    def silence(self) -> str | None:
        """Return the processes that are alive and don't answer, or None if all answer."""
        _, silent = self._look()
        names = " and ".join(f"TransferQueue's {name}" for name in silent)
        return f"{names} gave no sign of life for {_SIGN_S:g} s" if silent else None

    def _look(self) -> tuple[str | None, list[str]]:
        """Return the first death, as a message, and who does not answer."""
        calls = {name: actor.get_zmq_server_info.remote() for name, actor in self.actors().items()}
        answered, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_SIGN_S)
        silent = [name for name, ref in calls.items() if ref not in answered]
        death = None
        for name in [name for name in calls if name not in silent]:
            try:
                ray.get(calls[name])
            except ActorUnavailableError:  # Ray can't connect to it: it hangs, or its node is cut off
                silent.append(name)
            except RayActorError as error:
                where = on_host(calls[name], error)
                lost = "its rows are lost" if name != "controller" else "rows can't be located any more"
                after = f"{lost}: resume the run from its last checkpoint"
                death = death or f"TransferQueue's {name}{where} died; {after}"
        return death, [name + on_host(calls[name]) for name in silent]

    def close(self) -> None:
        for actor in self.actors().values():
            ray.kill(actor)
        remove_placement_group(self.room)


def start_servers(units: int, *, timeout_s: float) -> Servers:
    """Start the controller and `units` storage units. All are up when it returns."""
    transferqueue.prepare_import(timeout_s)
    room, options = _reserve(units), transferqueue.storage_options(units)
    controller_class, unit_class = transferqueue.server_classes()
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
                "the cluster is very busy"
            ) from None
        if isinstance(error, RayActorError):
            raise StoreError(f"TransferQueue did not start: {error}") from error
        raise
    address = pickle.dumps((controller, options | {"zmq_info": {info.id: info for info in stores}}))
    return Servers(uuid4().hex, started[0], tuple(started[1:]), room, address)


def _reserve(units: int) -> PlacementGroup:
    """Reserve a CPU for the controller and for each unit. Raise a RecipeError if the cluster has too few."""
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


_FIELD = "bytes"
_PARTITION = "practicum"
_CHECK_S = 2.0


class BlobMissing(Exception):
    """One of these blobs, which were read together, is not in TransferQueue (any more)."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        more = f" or one of {len(names) - 1} more" if len(names) > 1 else ""
        super().__init__(f"blob {names[0]}{more}")


class TransferQueueClient:
    """Puts and gets blobs of bytes. A blob's name is never used twice.

    All blobs are in one partition of TransferQueue: it never frees a partition that is cleared blob by blob,
    and clearing a whole partition would also drop puts in flight.
    """

    def __init__(self, servers: Servers, timeout_s: float) -> None:
        self.servers = servers
        self._broken: str | None = None
        transferqueue.prepare_import(timeout_s)
        address, options = pickle.loads(servers.address)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="transferqueue", daemon=True)
        self._thread.start()
        self._client = transferqueue.make_client(f"practicum_{uuid4().hex[:12]}", address)
        try:
            opening = asyncio.to_thread(transferqueue.open_storage, self._client, options)
            self.call(opening, "answer the first call", timeout_s)
        except BaseException:
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, Any], what: str, timeout_s: float) -> Any:
        """Return the result of `work`. After a death in TransferQueue this and all later calls fail."""
        if self._broken:
            work.close()
            raise StoreError(self._broken)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            futures.wait([future], min(left, _CHECK_S))
            if future.done():
                break
            self._raise_if_dead(future)
        else:
            future.cancel()
            well = "its processes answer: the cluster is overloaded, or runtime.stage_s is too short"
            why = self.servers.silence() or well
            raise DeadlineError(f"the store waited {timeout_s:g} s for TransferQueue to {what}; {why}")
        try:
            return future.result()
        except (BlobMissing, StoreError):
            raise
        except Exception as error:
            self._raise_if_dead(future)
            why = self.servers.silence() or error
            raise StoreError(f"TransferQueue could not {what}: {why}") from error

    def put(self, name: str, blob: Tensor, timeout_s: float) -> None:
        try:
            self.call(self._put(name, blob), f"take {len(blob)} bytes", timeout_s)
        except StoreError:
            # Not after a late put: it may still arrive, where another blob is stored by then.
            if not self._broken:
                self.clear([name], timeout_s)
            raise

    def get(self, names: Sequence[str], timeout_s: float) -> list[Tensor]:
        """Return the blobs of these names. Raise BlobMissing if one is missing."""
        return self.call(self._get(list(names)), f"return {len(names)} blobs", timeout_s) if names else []

    def clear(self, names: Sequence[str], timeout_s: float) -> None:
        """Delete these blobs, and skip missing ones."""
        if names:
            self.call(self._clear(list(names)), f"forget {len(names)} blobs", timeout_s)

    def check(self) -> None:
        """Raise a StoreError if an earlier call found that TransferQueue is broken."""
        if self._broken:
            raise StoreError(self._broken)

    def close(self) -> None:
        """Close sockets and threads. Further calls have no effect."""
        if self._thread.is_alive():
            self._broken = self._broken or "the store is closed"
            futures.wait([asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)], _CHECK_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CHECK_S)
            self._client.close()

    def _raise_if_dead(self, future: futures.Future[Any]) -> None:
        self._broken = self.servers.death()
        if self._broken is not None:
            future.cancel()
            raise StoreError(self._broken)

    async def _put(self, name: str, blob: Tensor) -> None:
        from tensordict import TensorDict

        meta = await self._client.async_kv_retrieve_meta([name], _PARTITION, create=True)
        await transferqueue.put_data(self._client, TensorDict({_FIELD: blob[None]}, batch_size=1), meta)

    async def _get(self, names: list[str]) -> list[Tensor]:
        meta = await self._client.async_kv_retrieve_meta(names, _PARTITION)
        if meta.size != len(names) or _FIELD not in meta.field_names or not meta.is_ready:
            raise BlobMissing(names)
        data = await transferqueue.get_data(self._client, meta)
        if data is None:
            raise BlobMissing(names)
        return list(data[_FIELD].unbind())

    async def _clear(self, names: list[str]) -> None:
        meta = await self._client.async_kv_retrieve_meta(names, _PARTITION)
        if meta.size:
            await self._client.async_clear_samples(meta)


async def _cancel_all() -> None:
    """Cancel all other tasks of this loop. A task that is merely dropped leaves its socket open."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_CLIENTS: dict[str, TransferQueueClient] = {}
_LOCK = threading.Lock()


def client_of(servers: Servers, timeout_s: float) -> TransferQueueClient:
    """Return this process's client of these servers, shared by all its stores."""
    with _LOCK:
        client = _CLIENTS.get(servers.uid)
        if client is None:
            client = _CLIENTS[servers.uid] = TransferQueueClient(servers, timeout_s)
        return client


def close_client(servers: Servers) -> None:
    with _LOCK:
        client = _CLIENTS.pop(servers.uid, None)
    if client is not None:
        client.close()
