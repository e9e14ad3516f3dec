"""The event loop closes what it opens, once, also where another kind of loop is the default."""

import subprocess
import sys

import pytest

READS_A_PIPE = """
import asyncio, os, uvloop
asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
from practicum.concurrency.event_loop import run_async

class Pipe:
    def __init__(self, handle):
        self.handle, self.closed = handle, 0
    def fileno(self):
        return self.handle
    def close(self):
        os.close(self.handle)  # an OSError if somebody else has closed it
        self.closed += 1

async def read():
    reads, writes = os.pipe()
    pipe, output = Pipe(reads), asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), pipe)
    os.write(writes, b"said")
    os.close(writes)
    said = await output.read()
    await asyncio.sleep(0)
    return said, pipe.closed

print(run_async(read(), timeout=60, owner="test"))
"""


def test_the_pipe_of_a_command_is_closed_at_its_end_and_once():
    pytest.importorskip("uvloop")  # which Ray's workers take
    ran = subprocess.run(
        [sys.executable, "-c", READS_A_PIPE], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "(b'said', 1)\n", "")
