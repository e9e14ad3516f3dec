"""vLLM's AsyncLLM on an event loop in its own thread, and the process of its engine core.

The thread lets `load_weights` and other calls wait for vLLM from any thread, and requests come from any loop.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, TypeVar

from practicum.engines.vllm import core_main
from practicum.engines.vllm.vllm_errors import explain
from practicum.engines.vllm.vllm_setup import VllmSetup
from practicum.errors import EngineError

CALL_S = 300.0
"""Deadline in seconds of all vLLM calls except sampling and scoring."""
_SHUTDOWN_S = 3.0
_STARTING = threading.Lock()
_CALL_PREFIX = re.compile(
    r"^Call to \w+ method failed: |Worker failed with error '|', please check the stack.*$"
)
_ERROR_LINE = re.compile(r"^[\w.]*(?:Error|Exception)\b.*")
T = TypeVar("T")


class VllmThread:
    """Starts an AsyncLLM and calls it. The constructor returns when the engine core's process exists."""

    def __init__(self, setup: VllmSetup) -> None:
        self._setup, self._closed, self._dead = setup, False, False
        self._process: Any = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._folder = TemporaryDirectory(prefix="practicum-vllm-log-")
        self._log = Path(self._folder.name, "errors.log")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()
        variables = setup.environment() | self._logging() | {core_main.DRIVER: str(os.getpid())}
        with _STARTING, _environment(variables), _core_main():
            before = set(multiprocessing.active_children())
            self._made = self._in_thread(self._make)
            until = time.monotonic() + setup.start_s
            while self._process is None and not self._made.done() and time.monotonic() < until:
                time.sleep(0.02)  # vLLM does not report that the process has started
                new = set(multiprocessing.active_children()) - before
                self._process = next((p for p in new if p.name.startswith("EngineCore")), None)

    @property
    def llm(self) -> Any:
        """vLLM's AsyncLLM, for coroutines that `ask` or `wait` run."""
        return self._made.result(0)

    @property
    def pid(self) -> int:
        """The process id of the engine core."""
        if self._process is None:
            raise EngineError(f"vLLM of {self._setup.where} is not running: it did not start")
        return self._process.pid

    def ready(self, first: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Wait until vLLM has loaded the model and completed a `first` request, which fails for some
        models."""
        setup = self._setup
        try:
            self._made.result(setup.start_s)
            asyncio.run_coroutine_threadsafe(first(), self._loop).result(CALL_S)
        except TimeoutError:
            raise EngineError(
                f"vLLM was not ready after {setup.start_s:g} s: reduce the load of the machine"
            ) from None
        except Exception as error:
            self._raise_if_killed("starting")
            raise explain(error, setup, self._logged()) from error
        self._loop.call_soon_threadsafe(self._loop.add_reader, self._process.sentinel, self._on_death)

    async def ask(self, work: Callable[[], Coroutine[Any, Any, T]], about: str) -> T:
        """Run a coroutine on vLLM's loop. If this call is cancelled, the coroutine is too."""
        return await asyncio.wrap_future(self._submit(work, about))

    def wait(self, work: Callable[[], Coroutine[Any, Any, T]], about: str) -> T:
        """Run a coroutine on vLLM's loop, and block until it is done."""
        future = self._submit(work, about)
        try:
            return future.result(CALL_S)
        except TimeoutError:
            future.cancel()
            raise EngineError(
                f"vLLM of {self._setup.where}: no response within {CALL_S:g} s ({about})"
            ) from None

    def call(self, method: str, *args: Any, **more: Any) -> Any:
        """Call a method of AsyncLLM, and block until it is done."""
        return self.wait(lambda: getattr(self.llm, method)(*args, **more), method)

    def close(self) -> None:
        """Stop the process. Requests in flight fail with an EngineError."""
        self._closed = True
        if self._made.done() and self._made.exception() is None:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._tasks])
            with suppress(TimeoutError):
                self._in_thread(lambda: self.llm.shutdown(timeout=_SHUTDOWN_S)).result(2 * _SHUTDOWN_S)
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join(_SHUTDOWN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SHUTDOWN_S)
        # AsyncLLM must go now: at the end of the interpreter it would report an error.
        self._made = Future()
        gc.collect()
        self._folder.cleanup()

    def _run(self) -> None:
        resource_tracker.ensure_running()  # starting it would unblock the signal
        # Processes that this thread starts do not hear Ctrl-C, which goes to the whole group.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._loop.run_forever()

    def _in_thread(self, function: Callable[[], T]) -> Future[T]:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def _submit(self, work: Callable[[], Coroutine[Any, Any, T]], about: str) -> Future[T]:
        if self._closed:
            raise EngineError("the engine is closed: create a new one")
        return asyncio.run_coroutine_threadsafe(self._guarded(work, about), self._loop)

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, T]], about: str) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            self._raise_if_killed(about)
            return await work()
        except asyncio.CancelledError:
            if self._closed:
                raise EngineError("the engine was closed") from None
            self._raise_if_killed(about)
            raise
        except EngineError:
            raise
        except Exception as error:
            if type(error).__name__ == "EngineDeadError":
                self._dead = True
            self._raise_if_killed(about)
            message = _CALL_PREFIX.sub("", str(error)) or type(error).__name__
            raise EngineError(f"vLLM of {self._setup.where} failed in {about}: {message}") from error
        finally:
            self._tasks.discard(task)

    def _on_death(self) -> None:
        """End all calls when the process has ended: vLLM does not end those of its workers."""
        self._loop.remove_reader(self._process.sentinel)
        self._dead = True
        for task in self._tasks:
            task.cancel()

    def _make(self) -> Any:
        from vllm import AsyncEngineArgs, AsyncLLMEngine  # pyright: ignore[reportAttributeAccessIssue]
        from vllm.platforms import current_platform

        setup = self._setup
        if current_platform.is_cpu():
            # In blocks of 128 tokens, vLLM's default, samples of a short prompt share none. A seeded sample
            # of a prompt that is computed in chunks ends vLLM on a CPU.
            device = {"block_size": 32} | ({"enable_chunked_prefill": False} if setup.samples else {})
        else:
            backend = {"backend": "ipc" if setup.tensor_parallel == 1 else "nccl"}
            sleeps = current_platform.is_sleep_mode_available()
            device = {"enable_sleep_mode": sleeps, "weight_transfer_config": backend}
        return AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**device | setup.arguments()))

    def _logging(self) -> dict[str, str]:
        """Return variables that send vLLM's errors to a file, because its exceptions do not carry them."""
        handler = {"class": "logging.FileHandler", "filename": str(self._log)}
        logger = {"handlers": ["file"], "level": "ERROR", "propagate": False}
        config = {"version": 1, "disable_existing_loggers": False, "handlers": {"file": handler}}
        file = Path(self._folder.name, "logging.json")
        file.write_text(json.dumps(config | {"loggers": {"vllm": logger}}))
        return {"VLLM_LOGGING_CONFIG_PATH": str(file)}

    def _logged(self) -> str:
        """Return the first error that vLLM's processes logged."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return next((line for line in lines if _ERROR_LINE.match(line)), "")

    def _raise_if_killed(self, about: str) -> None:
        until = time.monotonic() + 1.0
        while self._dead and self._process.exitcode is None and time.monotonic() < until:
            time.sleep(0.01)  # a thread of vLLM's is taking the exit code
        code = None if self._process is None else self._process.exitcode
        if (code is None and not self._dead) or (about == "starting" and code is not None and code >= 0):
            return
        how = (
            f"by signal {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exit code {code}"
        )
        hint = "; out of memory?" if code == -signal.SIGKILL else ""
        reason = f": {logged}" if (logged := self._logged()) else ""
        raise EngineError(
            f"vLLM of {self._setup.where} can't continue with {about}: its process {self.pid} ended "
            f"({how}{hint}){reason}"
        )


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a process that starts inside the context. Variables set by vLLM are restored too."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _core_main() -> Iterator[None]:
    """Make processes that start inside the context run `core_main` instead of the user's script."""
    script, replaced = sys.modules["__main__"], ModuleType("__main__")
    replaced.__spec__ = importlib.util.find_spec(core_main.__name__)
    sys.modules["__main__"] = replaced
    try:
        yield
    finally:
        sys.modules["__main__"] = script
