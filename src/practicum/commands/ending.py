"""The end of a command's process, which nothing that users' code left behind may put off."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress

from practicum.user_code import running_frames, writable

LEFT_S = 20.0
"""Seconds in which Python ends by itself: it waits for threads, pools of threads and child processes."""


def end_in_time(code: int) -> None:
    """Called when a command is done: should Python not end, the process does, and says what held it."""
    threading.Thread(target=_end_late, args=(code,), name="practicum-end", daemon=True).start()


def _end_late(code: int) -> None:
    time.sleep(LEFT_S)
    lines = ["the command is done; a reward, loop or tool left something running, which ends with it:"]
    lines += [f"  process {child.pid} ({child.name})" for child in multiprocessing.active_children()]
    for thread in threading.enumerate():
        if thread is threading.main_thread() or thread.ident is None:
            continue
        frames = running_frames(thread.ident, indent="    ")
        if frames or not thread.daemon:
            lines += [f"  thread {thread.name}", *filter(None, [frames])]
    with suppress(Exception):  # stderr may be closed
        print(writable("\n".join(lines)), file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():
        child.kill()
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(code)
