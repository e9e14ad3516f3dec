"""Only the thread that computes has helpers, so that they never outnumber the cores."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from practicum.concurrency.event_loop import run_async
from practicum.engines.torch.engine_thread import EngineThread, Job, Outcome

THREADS = 3
X = torch.ones(2**20)

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux")


def helpers(expected: int) -> int:
    """Return the number of native threads. Wait for what is expected: a thread takes a moment to end."""
    deadline = time.monotonic() + 10
    while True:
        count = len(os.listdir("/proc/self/task")) - threading.active_count()
        if count == expected or time.monotonic() > deadline:
            return count
        time.sleep(0.001)


def test_a_thread_that_waits_or_rests_has_no_helpers():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)  # makes threads of its own, which only XNNPACK uses
    few = len(os.listdir("/proc/self/task")) - threading.active_count()
    many = few + THREADS - 1
    seen: list[tuple[int, int]] = []

    def step(arrived: list[Job]) -> tuple[list[Outcome], bool]:
        at_first = helpers(few)
        X.add(1)
        seen.append((at_first, helpers(many)))
        return [(job, None) for job in arrived], False

    async def submit(*, computes_first: bool) -> None:
        if computes_first:
            X.add(1)
            assert helpers(many) == many
        await engine.submit(Job())

    engine = EngineThread(step, lambda: None, "engine")
    try:
        for computes_first in (False, False, True):
            X.add(1)
            assert helpers(many) == many
            run_async(submit(computes_first=computes_first), timeout=60, owner="test")
        assert helpers(few) == few
    finally:
        torch.set_num_threads(before)
        engine.close()
    assert seen == [(few, many)] * 3
