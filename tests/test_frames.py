"""The call chains of a step stay short enough for a reader."""

from __future__ import annotations

import re
import subprocess
import sys

from .frames import LIMITS


def test_chains_of_a_step_are_short():
    """In its own process: the functions that are traced are replaced."""
    command = [sys.executable, "-m", "tests.frames"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    frames = {name: int(count) for name, count in re.findall(r"^(.+): (\d+) frames", printed, re.MULTILINE)}
    assert frames.keys() == LIMITS.keys()
    assert all(frames[name] <= limit for name, limit in LIMITS.items()), printed
