"""Interfaces of Ray that are not public. Tested with Ray 2.60.

Without the tensor transport, which older versions lack, weights go through the object store.
"""

from __future__ import annotations

import inspect
from typing import Any

import ray
import ray._private.state
import ray.actor
import ray.exceptions
from ray import ObjectRef

from practicum.errors import ClusterError

TESTED = "2.60"
LOCAL_ONLY: dict[str, Any] = {"_node_ip_address": "127.0.0.1"}
"""Options of `ray.init` with which a cluster that is started here takes no connections from elsewhere."""
DIRECT_ERRORS: Any = getattr(ray.exceptions, "RayDirectTransportError", ())
"""Errors of tensors that Ray moves by NIXL."""
HAS_DIRECT = bool(DIRECT_ERRORS) and "_tensor_transport" in inspect.signature(ray.put).parameters

if not (hasattr(ray.actor.ActorHandle, "_actor_id") and hasattr(ObjectRef, "task_id")):
    raise ClusterError(f"found Ray {ray.__version__}, which lacks an interface: pip install ray~={TESTED}.0")


def actor_id(actor: Any) -> str:
    """Return an actor's id in Ray."""
    return actor._actor_id.hex()


def called_actor_id(call: ObjectRef[Any]) -> str:
    """Return the id of the actor that a call went to."""
    return call.task_id().actor_id().hex()


def host_of(call: ObjectRef[Any]) -> str:
    """Return the address of the host of the actor that a call went to, or "" if Ray does not know it."""
    return ray._private.state.actors(called_actor_id(call)).get("Address", {}).get("IPAddress", "")


def host_in(error: BaseException) -> str:
    """Return the address of the host of the actor that died, or "" if Ray's error does not have it."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line.removeprefix("ip: ") for line in lines if line.startswith("ip: ")), "")


def on_host(call: ObjectRef[Any] | None, error: BaseException | None = None) -> str:
    """Return " on ADDRESS" for the host of a call's actor, or of one that died; "" for this host."""
    address = (host_in(error) if error is not None else "") or (host_of(call) if call is not None else "")
    return f" on {address}" if address not in ("", ray.util.get_node_ip_address()) else ""


def put_direct(value: Any) -> ObjectRef[Any]:
    """Put an object whose tensors NIXL moves from device to device. They must be contiguous."""
    return ray.put(value, _tensor_transport="nixl")
