"""The served teacher: `practicum serve`, which is a victim too and is started again."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

START_S = 240.0


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
        deadline = time.monotonic() + START_S
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
