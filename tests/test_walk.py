"""The path of a step stays short enough for a reader."""

import re
import subprocess
import sys


def test_the_spine_of_a_step_is_short():
    """In its own process: the event loop's thread is traced from its start."""
    command = [sys.executable, "-m", "tests.walk"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    for file in ("trainer/step", "roles/rollout", "sessions/session", "roles/teachers", "roles/student"):
        assert f" {file}.py " in printed
    found = re.search(r"(\d+) files, (\d+) lines, (\d+) changes of folder", printed)
    assert found is not None
    files, lines, changes = map(int, found.groups())
    assert (files <= 12, lines < 1500, changes <= 4) == (True, True, True), printed
