"""A Ray cluster that runs of the campaign join; in other runs each starts its own."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.campaign.processes import Family

START_S = 300.0
_WAITING = re.compile(r"^ray::IDLE|default_worker\.py|setup_worker\.py")
"""Workers without an actor, which a cluster keeps ready."""


class Cluster:
    """Started when it is first asked for; it ends with the campaign's other processes."""

    def __init__(self, folder: Path, family: Family, cpus: int) -> None:
        self._folder, self._family, self._cpus = folder, family, cpus
        self._address = ""
        self._own: set[int] = set()

    def address(self) -> str:
        """Where runs join it."""
        if not self._address:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            before = set(self._family.look())
            options = [f"--port={port}", "--node-ip-address=127.0.0.1", f"--num-cpus={self._cpus}"]
            options += ["--object-store-memory=200000000", "--include-dashboard=false"]
            options += [f"--temp-dir={self._folder}", "--disable-usage-stats"]
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options]
            subprocess.run(command, check=True, timeout=START_S, stdout=subprocess.DEVNULL)
            self._address = f"127.0.0.1:{port}"
            self._own = set(self._family.look()) - before
        return self._address

    def owns(self, pid: int, text: str) -> bool:
        """Whether a process is the cluster's own, and not a run's."""
        return bool(self._address) and (pid in self._own or _WAITING.search(text) is not None)
