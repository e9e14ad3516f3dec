"""Only the thread that computes has helpers, so that they never outnumber the cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# In its own process, where no other test's threads come or go.
COUNTS = """
import os, threading, time, torch
from practicum.concurrency.event_loop import run_async
from practicum.engines.torch.engine_thread import EngineThread, Job

torch.set_num_threads(3)
few = len(os.listdir("/proc/self/task")) - threading.active_count()
x = torch.ones(2**20)

def helpers(expected):
    deadline = time.monotonic() + 5  # an ended thread takes a moment to go
    while True:
        count = len(os.listdir("/proc/self/task")) - threading.active_count() - few
        if count == expected or time.monotonic() > deadline:
            return count
        time.sleep(0.001)

def step(arrived):
    print(helpers(0), end=" ")
    x.add(1)
    print(helpers(2), end=" ")
    return [(job, None) for job in arrived], False

async def work():
    x.add(1)
    print(helpers(2), end=" ")
    await engine.submit(Job())
    print(helpers(0), end=" ")
    x.add(1)
    print(helpers(2), end=" ")

engine = EngineThread(step, lambda: None, "engine")
for _ in range(2):
    x.add(1)
    print(helpers(2), end=" ")
    run_async(work(), timeout=60, owner="test")
    print(helpers(0), end=" ")
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux")
def test_a_thread_that_waits_or_rests_has_no_helpers():
    ran = subprocess.run(
        [sys.executable, "-c", COUNTS], capture_output=True, text=True, timeout=120, check=False
    )
    # Of the main thread, the event loop, the engine at first and later, the event loop before and after.
    assert ran.stdout.split() == ["2", "2", "0", "2", "0", "2", "0"] * 2, ran.stderr
