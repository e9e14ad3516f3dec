import asyncio
import threading

import pytest

from practicum.concurrency.event_loop import event_loop, run_async
from practicum.errors import DeadlineError


def test_all_async_work_runs_on_one_loop():
    async def where() -> tuple[asyncio.AbstractEventLoop, str]:
        return asyncio.get_running_loop(), threading.current_thread().name

    first = run_async(where(), timeout=5, owner="test")
    second = run_async(where(), timeout=5, owner="test")
    assert first == second == (event_loop(), "practicum-events")


def test_a_deadline_names_its_owner_and_cancels_the_work():
    cancelled = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(DeadlineError, match=r"rollout of step 3 was not done after 0\.05 s"):
        run_async(waits(), timeout=0.05, owner="rollout of step 3")
    assert cancelled.wait(5)


def test_a_timeout_raised_by_the_work_is_not_taken_for_the_deadline():
    async def breaks() -> None:
        raise TimeoutError("the tool's own")

    with pytest.raises(TimeoutError, match="the tool's own"):
        run_async(breaks(), timeout=5, owner="test")


def test_a_task_that_exits_does_not_end_the_loop():
    async def exits() -> None:
        raise SystemExit(3)

    async def watches() -> str:
        task = asyncio.ensure_future(exits())
        await asyncio.wait({task})
        return repr(task.exception())

    for _ in range(2):
        assert run_async(watches(), timeout=5, owner="test") == "SystemExit(3)"
