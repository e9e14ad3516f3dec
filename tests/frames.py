"""Call frames from `StepRunner.step` to three places: `python -m tests.frames` prints the chains.

A real tiny GRPO step runs in this process. A chain has every frame of the package that waits for the place:
functions, lambdas, closures and coroutines. Nothing is left out. For a sampled token these are the frames of
the thread that runs the step, the coroutines that await the engine, and the frames of the engine's thread.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import practicum
import practicum.engines.torch.model_runner as model_runner
import practicum.learning.logprobs as logprobs
from practicum.algorithms import losses
from practicum.concurrency.event_loop import event_loop
from practicum.trainer.run import train_loaded
from practicum.trainer.step import StepRunner

from .trainer.recipes import tiny

LIMITS = {"old logprobs": 8, "policy loss": 10, "sampled token": 14}
ROOT = Path(practicum.__file__).parent
Chain = list[str]


def name_of(frame: FrameType) -> str | None:
    """Return file and function of a frame of the package."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    return f"{path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_qualname}"


def stack(frame: FrameType | None) -> Chain:
    """Return the package's frames from below `StepRunner.step`, or from the thread's first, to this one."""
    chain: Chain = []
    while frame is not None and frame.f_code is not StepRunner.step.__code__:
        chain.append(name_of(frame) or "")
        frame = frame.f_back
    return [name for name in reversed(chain) if name]


def awaiting(task: asyncio.Task[Any]) -> Chain:
    """Return the frames of the coroutines in which a task is suspended, the outermost first."""
    chain: Chain = []
    coroutine: Any = task.get_coro()
    while coroutine is not None and hasattr(coroutine, "cr_frame"):
        chain.append((name_of(coroutine.cr_frame) if coroutine.cr_frame is not None else None) or "")
        coroutine = coroutine.cr_await
    return [name for name in chain if name]


class Tasks:
    """Which task created which: those of a task group are awaited by their creator."""

    def __init__(self) -> None:
        self._creators: dict[asyncio.Task[Any], asyncio.Task[Any] | None] = {}
        event_loop().set_task_factory(self._create)

    def _create(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        self._creators[task] = asyncio.current_task(loop)
        return task

    def chain_to(self, function: str) -> Chain:
        """Return the coroutines that wait for the first task that is suspended in this function."""
        waiting: asyncio.Task[Any] | None = next(
            task for task in list(self._creators) if (awaiting(task) or [""])[-1].endswith(f" {function}")
        )
        chain: Chain = []
        while waiting is not None:
            chain = awaiting(waiting) + chain
            waiting = self._creators[waiting]
        return chain


def trace_chains() -> dict[str, Chain]:
    """Return the three chains of a step."""
    chains: dict[str, Chain] = {}
    tasks, step_thread = Tasks(), threading.get_ident()

    def seen(
        name: str, place: Any, attribute: str, chain: Callable[[FrameType], Chain]
    ) -> Callable[[], None]:
        function = getattr(place, attribute) if not isinstance(place, dict) else place[attribute]

        def spy(*args: Any, **options: Any) -> Any:
            if StepRunner.step.__code__ in codes(sys._current_frames()[step_thread]):
                chains[name] = [*chain(sys._getframe(1)), f"{function.__module__} {function.__qualname__}"]
            return function(*args, **options)

        put = place.__setitem__ if isinstance(place, dict) else lambda key, value: setattr(place, key, value)
        put(attribute, spy)
        return lambda: put(attribute, function)

    def sampled(frame: FrameType) -> Chain:
        return (
            stack(sys._current_frames()[step_thread]) + tasks.chain_to("EngineThread.submit") + stack(frame)
        )

    undo = [
        seen("old logprobs", logprobs, "token_logprobs", stack),
        seen("policy loss", losses.POLICY_LOSSES, "ppo_clip", stack),
        seen("sampled token", model_runner, "sample", sampled),
    ]
    try:
        with tempfile.TemporaryDirectory() as folder:
            train = {"steps": 1, "prompts": 2, "minibatches": 2, "lr": 1e-3}
            train_loaded(tiny(Path(folder), train=train, eval={"rows": 1}), Path(folder) / "run", quiet=True)
    finally:
        event_loop().set_task_factory(None)
        for restore in undo:
            restore()
    return chains


def codes(frame: FrameType | None) -> set[Any]:
    """Return the code of all frames of a stack."""
    found = set()
    while frame is not None:
        found.add(frame.f_code)
        frame = frame.f_back
    return found


def main() -> None:
    for name, chain in trace_chains().items():
        print(f"{name}: {len(chain)} frames, at most {LIMITS[name]}")
        for number, frame in enumerate(chain, start=1):
            print(f"  {number:>2}. {frame}")


if __name__ == "__main__":
    main()
