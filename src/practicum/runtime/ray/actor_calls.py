"""Call actors. Every call has a deadline, and every error names its worker."""

from __future__ import annotations

import asyncio
import pickle
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from practicum.compat.ray import called_actor_id, on_host
from practicum.dataplane.wire import grow, shrink
from practicum.errors import DeadlineError, PracticumError

_DEATHS = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOGS = "see logs/worker-*.err in the folder of Ray's session; dmesg shows if memory ran out"


class WorkerDied(PracticumError):
    """A worker's process died. `actor` is its id in Ray, which differs between workers with the same name."""

    def __init__(self, name: str, reason: str, actor: str = "") -> None:
        self.name, self.reason, self.actor = name, reason, actor
        super().__init__(f"{name} died: {reason}\n  → {_LOGS}")


def pack_value(value: Any) -> bytes:
    """Return a compressed pickle. Functions of the user's script are in it, as in all that Ray pickles."""
    return shrink(ray.cloudpickle.dumps(value))  # pyright: ignore[reportAttributeAccessIssue]


def unpack_value(packed: bytes) -> Any:
    return pickle.loads(grow(packed))


def ask(refs: Sequence[ObjectRef[Any]], *, timeout: float, owner: str, who: Sequence[str]) -> list[Any]:
    """Return the results of calls in order. Raise the first failure immediately. Errors are those that the
    worker raised. A dead worker is WorkerDied. `who` names the workers."""
    names = dict(zip(refs, who, strict=True))
    results: dict[ObjectRef[Any], Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(refs):
        pending = [ref for ref in refs if ref not in results]
        ready, _ = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        ref = (ready or pending)[0]
        try:
            results[ref] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError:
            raise _late(owner, timeout, {ref: names[ref] for ref in pending}) from None
        except RayError as error:
            raise _named(error, names[ref], ref) from None
    return [results[ref] for ref in refs]


def first_death(refs: Sequence[ObjectRef[Any]], who: Sequence[str], *, timeout: float) -> WorkerDied | None:
    """Return the first death among these calls, if Ray reports one within the timeout."""
    ended, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout)
    names = dict(zip(refs, who, strict=True))
    for ref in ended:
        try:
            ray.get(ref, timeout=timeout)
        except RayError as error:
            if isinstance(death := _named(error, names[ref], ref), WorkerDied):
                return death
    return None


async def ask_async(ref: ObjectRef[Any], *, timeout: float, owner: str, who: str) -> Any:
    """Return the result of one call, on an event loop. If cancelled or late, cancel the call."""
    try:
        async with asyncio.timeout(timeout):
            return await ref
    except RayError as error:  # before TimeoutError: a worker's own is both
        raise _named(error, who, ref) from None
    except TimeoutError:
        ray.cancel(ref)
        raise _late(owner, timeout, {ref: who}) from None
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise


async def each_report(reports: Any, *, who: str) -> AsyncIterator[Any]:
    """Yield results of a streaming call as they arrive. Closing the iterator cancels the call. `reports` is
    the call's ObjectRefGenerator. Set the deadline at the call site."""
    try:
        async for ref in reports:
            try:
                yield await ref
            except RayError as error:
                raise _named(error, who, ref) from None
    except (asyncio.CancelledError, GeneratorExit):
        ray.cancel(reports)
        raise


def located(ref: ObjectRef[Any], who: str) -> str:
    """Return the name of the worker that a call went to, with its host's address unless that is this one."""
    return who + on_host(ref)


def _late(owner: str, timeout: float, pending: Mapping[ObjectRef[Any], str]) -> DeadlineError:
    names = ", ".join(located(ref, who) for ref, who in pending.items())
    return DeadlineError(f"{owner} waited {timeout:g} s for {names}: no answer")


def _named(error: RayError, who: str, ref: ObjectRef[Any]) -> BaseException:
    """Return the worker's exception with a note that names the worker, or WorkerDied if it died."""
    if isinstance(error, RayTaskError):  # first: if a worker saw another die, its error is a death too
        cause = error
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if isinstance(cause, _DEATHS):
            cause = WorkerDied(f"an actor that {who} asked", _reason(cause), getattr(cause, "actor_id", ""))
        if isinstance(cause, PracticumError):
            cause.add_note(f"raised in {who}")
            return cause
        # An error that can't be pickled comes as Ray's own error, which names it.
        raised = error if isinstance(cause, RayError) else cause
        raised.add_note(f"raised in {who}:\n{_COLOUR.sub('', str(error))}")
        return raised
    if isinstance(error, _DEATHS):
        return WorkerDied(who, _reason(error, ref), called_actor_id(ref))
    error.add_note(f"from a call of {who}")
    return error


def _reason(error: BaseException, ref: ObjectRef[Any] | None = None) -> str:
    """Return the line of Ray's message that says why: the last one, without its list of common causes. Append
    the address of the worker's host, if that is not this one."""
    where = f" (it ran{host})" if (host := on_host(ref, error)) else ""
    if isinstance(error, ActorUnavailableError):  # whoever restarts it ends it first
        return f"it accepts no connections: it hangs, or its machine is unreachable{where}"
    lines = _COLOUR.sub("", str(error)).strip().splitlines() or [type(error).__name__]
    return lines[-1].split(" Some common causes")[0].strip() + where
