"""A run has its folder to itself. The system drops the lock with the process that holds it."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from practicum.errors import PracticumError
from practicum.trainer.versions import now

_FILE = ".lock"


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a run folder; a PracticumError if another run does.

    The folder is made if it is not there, and removed again if nothing was written into it.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        handle = _lock(folder / _FILE)
        try:
            os.truncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {now()}".encode())
            yield
        finally:
            (folder / _FILE).unlink(missing_ok=True)
            os.close(handle)
    finally:
        for place in made:
            with suppress(OSError):
                place.rmdir()


def _lock(path: Path) -> int:
    """A handle of the file, locked; on a file system without locks it is only opened."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace") or "it has just begun"
            os.close(handle)
            raise PracticumError(
                f"{path.parent} is in use by another run ({holder}): wait for its end, or choose another "
                "folder with --out DIR"
            ) from None
        except OSError:
            return handle
        # Whoever held it before may have removed the file: then this lock is of nothing.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)
