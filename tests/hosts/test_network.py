"""However a process with hosts ends, no namespace is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.network import Network, require

pytestmark = pytest.mark.long

HOLD = """
import signal
from tests.campaign.processes import end_cleanly
from tests.hosts.network import Network

end_cleanly()
with Network([f"host{n}" for n in range(4)]):
    print("ready", flush=True)
    signal.pause()
"""


def spaces_of(pid: int) -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=30)
    return [line for line in done.stdout.splitlines() if line.startswith(f"pr{pid}-")]


@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_a_signal_leaves_no_namespace(first: str):
    """More signals come until it has ended. What a process leaves that is killed without notice, the next one
    removes."""
    require()
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", HOLD], cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(spaces_of(process.pid)) == 5
    process.send_signal(getattr(signal, first))
    deadline = time.monotonic() + 60
    while process.poll() is None:
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    process.stdout.close()
    if first == "SIGKILL":
        with Network(["another"]):
            pass
    assert spaces_of(process.pid) == []
