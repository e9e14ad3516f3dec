"""The process table: all processes of the campaign, also those whose parents are gone, and what they are."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_START_S = 240.0
MARK = "PRACTICUM_CAMPAIGN"
"""The environment variable that all processes of one campaign have, but for those that write over it."""


class Family:
    """Every process that this one has started, directly or not, whenever somebody looked."""

    def __init__(self, mark: str) -> None:
        self._mark = f"{MARK}={mark}".encode()
        self._known: dict[int, str] = {}
        """Process id and start time: an id may become another's."""

    def look(self) -> dict[int, str]:
        """Those that are alive now, with their command lines; this process is left out."""
        table = {pid: stat for pid in _pids() if (stat := _stat(pid)) is not None}
        found = {pid for pid, began in self._known.items() if pid in table and table[pid][2] == began}
        found |= {pid for pid in table if pid not in found and self._is_marked(pid)}
        parents = found | {os.getpid()}
        while more := {pid for pid, stat in table.items() if int(stat[1]) in parents} - parents:
            parents |= more
        found = parents - {os.getpid()}
        self._known = {pid: table[pid][2] for pid in found}
        return {pid: command(pid) for pid in found if table[pid][0] != "Z"}

    def kill(self) -> None:
        """kill -9 of all of them, and of what they start meanwhile."""
        for _ in range(20):
            left = self.look()
            if not left:
                return
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _is_marked(self, pid: int) -> bool:
        return self._mark in _read(pid, "environ").split(b"\0")


def end_cleanly() -> None:
    """Have SIGTERM and Ctrl-C end this process by an exception, so that it can end all others. Later ones do
    not disturb it then. What a script starts with & ignores Ctrl-C."""
    signals = signal.SIGTERM, signal.SIGINT, signal.SIGHUP

    def leave(number: int, frame: object) -> None:
        for later in signals:
            signal.signal(later, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in signals:
        signal.signal(number, leave)


def command(pid: int) -> str:
    """Its command line, or the title that it gave itself."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def shared_memory() -> set[str]:
    """Files in /dev/shm that no process has open or mapped: nobody will remove them."""
    there = {str(path) for path in Path("/dev/shm").iterdir()}
    for pid in _pids() if there else ():
        with suppress(OSError):
            there -= {line.split()[-1] for line in _read(pid, "maps").decode(errors="replace").splitlines()}
            there -= {os.readlink(handle) for handle in Path(f"/proc/{pid}/fd").iterdir()}
    return there


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[str, str, str] | None:
    """State, parent and start time."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return (fields[0].decode(), fields[1].decode(), fields[19].decode()) if fields else None


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


class Server:
    """One server on one port; `ensure` starts it if it is not there or does not answer."""

    def __init__(self, model: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._model, self._log = model, log
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{self._port}/v1"

    def pids(self) -> list[int]:
        return [self._process.pid] if self._process is not None else []

    def ensure(self) -> None:
        """Have it answer."""
        if self._process is not None and self._answers(5.0):
            return
        self.close()
        command = [sys.executable, "-m", "practicum", "serve", str(self._model), "--port", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--threads", "1", "--name", "served"], stdout=log, stderr=log
            )
        deadline = time.monotonic() + _START_S
        while not self._answers(2.0):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the served teacher does not start, see {self._log}")
            time.sleep(0.2)

    def _answers(self, seconds: float) -> bool:
        """Whether it answers a request: a stopped process takes connections all the same."""
        try:
            with socket.create_connection(("127.0.0.1", self._port), seconds) as talk:
                talk.settimeout(seconds)
                talk.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
                return talk.recv(5) == b"HTTP/"
        except OSError:
            return False

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
