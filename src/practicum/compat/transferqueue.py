"""Interfaces of TransferQueue that are not public. Tested with TransferQueue 0.1.11.

TransferQueue's processes are started one by one, not by `tq.init()`: it hangs on a cluster that is too small,
uses fixed names, so that a second run would join the first, and has no deadline. The client's own put and get
are not used: they change torch's number of threads for the whole process, and a put makes one more call.
"""

from __future__ import annotations

import os
from importlib import metadata, resources
from typing import Any

from practicum.errors import StoreError

TESTED = "0.1.11"
BACKEND = "SimpleStorage"


def prepare_import(timeout_s: float) -> None:
    """Check the version, and set what TransferQueue reads from the environment when it is imported.

    A request to a storage unit is tried three times within our deadline. TransferQueue ignores it when the
    controller does not confirm a put in time, so the time for that is longer than our own deadline.
    """
    if (found := metadata.version("TransferQueue")) != TESTED:
        raise StoreError(
            f"found TransferQueue {found}, expected {TESTED}: pip install TransferQueue=={TESTED}"
        )
    os.environ.setdefault("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", str(max(1, int(timeout_s / 3))))
    os.environ.setdefault("TQ_DATA_UPDATE_RESPONSE_TIMEOUT", str(int(10 * timeout_s) + 1))


def server_classes() -> tuple[Any, Any]:
    """Return the Ray actor classes of the controller and of a storage unit."""
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    return TransferQueueController, SimpleStorageUnit


def storage_options(units: int) -> dict[str, Any]:
    """Return TransferQueue's default options for this many storage units."""
    from omegaconf import OmegaConf

    config = OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml"))
    options = OmegaConf.to_container(config.backend[BACKEND], resolve=True)
    assert isinstance(options, dict)
    return {str(name): value for name, value in options.items()} | {"num_data_storage_units": units}


def make_client(name: str, address: Any) -> Any:
    """Return an asynchronous client of the controller at this address."""
    from transfer_queue.client import AsyncTransferQueueClient

    return AsyncTransferQueueClient(name, address, zmq_io_threads=1)


def open_storage(client: Any, options: dict[str, Any]) -> None:
    """Connect a client to the storage units. Blocks on a handshake."""
    client.initialize_storage_manager(BACKEND, options)


async def put_data(client: Any, data: Any, meta: Any) -> None:
    """Write a TensorDict to the samples of `meta`."""
    await client.storage_manager.put_data(data, meta)


async def get_data(client: Any, meta: Any) -> Any | None:
    """Return the samples of `meta` as a TensorDict, or None if one is missing."""
    from transfer_queue import StorageKeyNotFoundError

    try:
        return await client.storage_manager.get_data(meta)
    except StorageKeyNotFoundError:
        return None
