"""The child's side of a process: loads what it serves, then answers what comes through a pipe to its end.

Nothing here imports torch, because the number of threads is read when torch is loaded.
"""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol

from practicum.concurrency.open_time import OpenTime
from practicum.errors import PracticumError

HELLO = 0
"""The number of the first reply, without a request: the model is loaded, or why it is not."""
CANCEL, STOP = "cancel", "stop"
_ORPHAN_S = 5.0
"""How long a process without a parent may take to end by itself."""


class ChildRequest(NamedTuple):
    """Something to do, by its name, with its arguments."""

    number: int
    what: str
    args: tuple[Any, ...] = ()


class ChildReply(NamedTuple):
    """The answer to a request: a result, or an error's message; and the seconds of work so far."""

    number: int
    result: Any
    error: str | None
    busy_s: float


class Served(Protocol):
    """What a process has loaded and answers with; the seconds of requests in WORK are counted."""

    WORK: ClassVar[frozenset[str]]

    async def answer(self, request: ChildRequest) -> Any: ...

    def close(self) -> None: ...


class _Pickler(pickle.Pickler):
    """Takes tensors as their numbers: as they are, they bring all of the memory that they are views of."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return NotImplemented
        numbers = value.detach().cpu()
        if numbers.dtype is torch.bfloat16:  # which numpy does not know
            return _bfloat16, (numbers.view(torch.int16).numpy(),)
        return torch.from_numpy, (numbers.numpy(),)


def _bfloat16(bits: Any) -> Any:
    import torch

    return torch.from_numpy(bits).view(torch.bfloat16)


def send(pipe: Connection, message: Any) -> None:
    """Write one message, of which nothing is shared with the other side; tensors arrive on the CPU."""
    written = io.BytesIO()
    _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(message)
    pipe.send_bytes(written.getbuffer())


def receive(pipe: Connection) -> Any:
    """Read one message; EOFError or OSError when the other side is gone."""
    return pickle.loads(pipe.recv_bytes())


def serve(pipe: Connection, load: Callable[[], tuple[Served, Any]]) -> NoReturn:
    """Run the process from its start to its end; `load` gives what is served, and what is said of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group: the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # processes that are started here may hear it
    threading.Thread(target=die_with_parent, name="parent", daemon=True).start()
    try:
        served, facts = load()
    except Exception as error:
        _send_if_heard(pipe, [ChildReply(HELLO, None, message_of_error(error), 0.0)])
        _leave(1)
    if _send_if_heard(pipe, [ChildReply(HELLO, facts, None, 0.0)]):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(_RequestServer(pipe, served).run())
        loop.close()
    served.close()
    _leave(0)


def message_of_error(error: BaseException) -> str:
    """An error as the parent will show it."""
    return str(error) if isinstance(error, PracticumError) else f"{type(error).__name__}: {error}"


def die_with_parent() -> None:
    """End when the parent was killed, also while loading, when nobody looks at the pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(_ORPHAN_S)
    os._exit(1)


def _leave(code: int) -> NoReturn:
    """End now: taking torch apart would keep whoever closes the process waiting for seconds."""
    # Else the parent is told of semaphores that were left behind.
    util._run_finalizers(0)  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _RequestServer:
    """Answers requests side by side; those that came in one message are begun together, and replies of one
    turn of the event loop are sent together."""

    def __init__(self, pipe: Connection, served: Served) -> None:
        self._pipe, self._served = pipe, served
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._replies: list[ChildReply] = []
        self._ended = asyncio.Event()
        self._busy = OpenTime()

    async def run(self) -> None:
        """Serve until the parent says stop or is gone."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="requests", daemon=True).start()
        await self._ended.wait()
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                requests = receive(self._pipe)
            except (EOFError, OSError):
                requests = [ChildRequest(HELLO, STOP)]
            loop.call_soon_threadsafe(self._take, requests)
            if any(request.what == STOP for request in requests):
                return

    def _take(self, requests: list[ChildRequest]) -> None:
        for request in requests:
            if request.what == STOP:
                self._ended.set()
            elif request.what == CANCEL:
                if task := self._tasks.get(request.number):
                    task.cancel()
            else:
                task = self._tasks[request.number] = asyncio.ensure_future(self._answer(request))
                task.add_done_callback(lambda _, number=request.number: self._tasks.pop(number))

    async def _answer(self, request: ChildRequest) -> None:
        result, message = None, None
        try:
            with self._busy.work() if request.what in self._served.WORK else nullcontext():
                result = await self._served.answer(request)
        except Exception as error:
            message = message_of_error(error)
        if not self._replies:
            asyncio.get_running_loop().call_soon(self._send)
        self._replies.append(ChildReply(request.number, result, message, self._busy.seconds))

    def _send(self) -> None:
        replies, self._replies = self._replies, []
        if not _send_if_heard(self._pipe, replies):
            self._ended.set()


def _send_if_heard(pipe: Connection, replies: list[ChildReply]) -> bool:
    try:
        send(pipe, replies)
    except OSError:  # the parent is gone, and with it everyone who waits
        return False
    return True
