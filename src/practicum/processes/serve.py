"""The child's side of `host`: load objects, then call their methods for the parent.

torch is imported only after the parent's setup arrives, because it reads its thread settings on import.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from practicum.errors import EngineError, PracticumError

HELLO = 0
"""Number of the first reply, which reports that the objects are loaded or failed to load."""
ALIVE, CANCEL, STOP = "alive", "cancel", "stop"
_ORPHAN_S = 5.0
"""Deadline in seconds for a process without a parent to end by itself."""

Loader = Callable[[], Sequence[Any]]
"""Creates the served objects. A module's function, or a `functools.partial` of one."""


class Call(NamedTuple):
    """A method of one of the served objects."""

    number: int
    method: str
    args: tuple[Any, ...] = ()
    target: int = 0


class Reply(NamedTuple):
    number: int
    result: Any = None
    error: Exception | None = None


class _Pickler(pickle.Pickler):
    """Copies the elements of tensors. Pickling a view would send its whole storage."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return NotImplemented
        tensor = value.detach().cpu()
        if tensor.dtype is torch.bfloat16:  # which numpy does not have
            return _bfloat16, (tensor.view(torch.int16).numpy(),)
        return torch.from_numpy, (tensor.numpy(),)


def _bfloat16(bits: Any) -> Any:
    import torch

    return torch.from_numpy(bits).view(torch.bfloat16)


def send(pipe: Connection, message: Any) -> None:
    """Write a message without shared memory. Tensors arrive on the CPU."""
    written = io.BytesIO()
    _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(message)
    pipe.send_bytes(written.getbuffer())


def receive(pipe: Connection) -> Any:
    """Read a message. Raise EOFError or OSError if the other side has ended."""
    return pickle.loads(pipe.recv_bytes())


def main(file: int) -> NoReturn:
    """Run the process. `file` is its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    pipe, loop = Connection(file), asyncio.new_event_loop()
    try:
        load, threads = receive(pipe)
        server = _Server(pipe, loop)
        threading.Thread(target=server.read, name="calls", daemon=True).start()
        server.targets = _load(load, threads)
    except Exception as error:
        _sent(pipe, [Reply(HELLO, error=_portable(error))])
        _leave(1)
    if _sent(pipe, [Reply(HELLO)]):
        loop.run_until_complete(server.run())
    for target in server.targets:
        target.close()
    _leave(0)


def _load(load: Loader, threads: int) -> Sequence[Any]:
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(threads)
    disable_progress_bar()  # bars of several processes would overwrite each other
    return load()


def _leave(code: int) -> NoReturn:
    """Exit immediately. A regular exit spends seconds on torch's clean-up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Server:
    """Handles calls concurrently. Calls of one message start together, and replies of one iteration of the
    event loop are sent together."""

    def __init__(self, pipe: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._pipe, self._loop = pipe, loop
        self.targets: Sequence[Any] = ()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._replies: list[Reply] = []
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until the parent sends stop or ends."""
        await self._ended.wait()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def read(self) -> None:
        """Read calls. End the process if the parent has ended, even while loading."""
        while True:
            try:
                calls = receive(self._pipe)
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self._ended.set)
                time.sleep(_ORPHAN_S)
                os._exit(1)
            self._loop.call_soon_threadsafe(self._take, calls)

    def _take(self, calls: list[Call]) -> None:
        for call in calls:
            if call.method == STOP:
                self._ended.set()
            elif call.method == CANCEL:
                if task := self._tasks.get(call.number):
                    task.cancel()
            else:
                task = self._tasks[call.number] = asyncio.ensure_future(self._answer(call))
                task.add_done_callback(lambda _, number=call.number: self._tasks.pop(number))

    async def _answer(self, call: Call) -> None:
        try:
            reply = Reply(call.number, await self._result(call))
        except Exception as error:
            reply = Reply(call.number, error=_portable(error))
        if not self._replies:
            self._loop.call_soon(self._send)
        self._replies.append(reply)

    async def _result(self, call: Call) -> Any:
        if call.method == ALIVE:
            return max(getattr(target, "step_s", 0.0) for target in self.targets)
        method = getattr(self.targets[call.target], call.method)
        if inspect.iscoroutinefunction(method):
            return await method(*call.args)
        # A sync method may wait for an engine step, and must not block other calls.
        return await asyncio.to_thread(method, *call.args)

    def _send(self) -> None:
        replies, self._replies = self._replies, []
        if not _sent(self._pipe, replies):
            self._ended.set()


def _sent(pipe: Connection, replies: list[Reply]) -> bool:
    try:
        send(pipe, replies)
    except OSError:  # the parent has ended
        return False
    return True


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled: PracticumErrors unchanged, others by message."""
    return error if isinstance(error, PracticumError) else EngineError(f"{type(error).__name__}: {error}")
