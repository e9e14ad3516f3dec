"""Main module of vLLM's processes, in place of the user's script. It ends them with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

DRIVER = "PRACTICUM_DRIVER_PID"
"""The environment variable with the process id of the run, for all processes of vLLM."""
_PR_SET_PDEATHSIG = 1

if sys.platform == "linux" and DRIVER in os.environ:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        state = Path(f"/proc/{os.environ[DRIVER]}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        state = "X"
    if state in "XZ":  # the run died before it was watched
        sys.exit(1)
