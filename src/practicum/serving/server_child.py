"""A guarded child process: its log, its end, and nothing of it left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from practicum.serving import guard

LINES = 400
"""Last lines of the log that are kept."""
_GRACE_S, _REST_S = 10.0, 5.0
"""Seconds that the command, and then what it has left behind, may take to end when asked."""


class ServerChild:
    """A command under a guard (`serving.guard`) while this context lasts, whatever ends this process."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._kept: deque[str] = deque(maxlen=LINES)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", str(Path(guard.__file__)), f"{_GRACE_S:g}", f"{_REST_S:g}", *command],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="log of a server", daemon=True)
        self._reader.start()

    def __enter__(self) -> ServerChild:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End the command: ask, and kill after the grace. A second Ctrl-C kills at once."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(_GRACE_S + _REST_S + 2)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            # The guard's death is the command's (Linux); elsewhere it ends by the closed input.
            with contextlib.suppress(ProcessLookupError):
                self._guard.send_signal(signal.SIGKILL)
            self._guard.wait(5)
        self._reader.join(5)

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code of the command, None if it still runs after the timeout."""
        try:
            code = self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(5)  # what it said last is there too
        return code

    def log(self) -> str:
        """What the command has said, as far as it is kept."""
        return "\n".join(self._kept)

    def _read(self) -> None:
        assert self._guard.stdout is not None
        for raw in self._guard.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._kept.append(line)
            if self._verbose:
                print(line, file=sys.stderr, flush=True)
