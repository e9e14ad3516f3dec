"""`practicum view`: serve a page for the given run folders until Ctrl-C."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn

from practicum.errors import PracticumError
from practicum.observe.records.json_files import read_mapping
from practicum.observe.view.run_view import RunView
from practicum.observe.view.web_app import make_app

HOST, PORT = "127.0.0.1", 8765
_GRACE_S, _END_S = 3, 6.0
"""Seconds for open pages to close their connections, and for the server's process to end."""
_DEPTH = 3
"""Folders below a folder of runs in which runs are looked for."""


def find_runs(folders: Sequence[Path]) -> list[RunView]:
    """Return the runs of these folders, each a run or a folder of runs; by default those below ./runs."""
    paths: list[Path] = []
    for folder in folders or [Path("runs")]:
        patterns = ["*/" * depth + "versions.json" for depth in range(_DEPTH + 1)]
        markers = (marker for pattern in patterns for marker in folder.glob(pattern))
        found = [marker for marker in markers if "practicum" in read_mapping(marker)]
        if not found:
            raise PracticumError(
                f"no run found in {folder}: expected a run folder such as runs/NAME, or a folder of runs. "
                "Start one with `practicum demo` or `practicum train RECIPE`"
            )
        paths += [marker.parent for marker in sorted(found, key=lambda marker: -marker.stat().st_mtime)]
    return name_runs(paths)


def name_runs(folders: Sequence[Path]) -> list[RunView]:
    """Name each run by the shortest end of its path that no other has, as a word of an address."""
    paths = list(dict.fromkeys(folder.absolute() for folder in folders))
    runs = []
    for path in paths:
        ends = (path.parts[-length:] for length in range(1, len(path.parts)))
        alone = (end for end in ends if sum(other.parts[-len(end) :] == end for other in paths) == 1)
        runs.append(RunView(path, "~".join(next(alone, path.parts[1:])) or "run"))
    return runs


def listen(port: int | None) -> socket.socket:
    """Return a local socket at this port, by default the usual one or else a free one."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, PORT if port is None else port))
        bound.listen(128)
    except OSError as error:
        bound.close()
        if port is None:
            return listen(0)
        raise PracticumError(
            f"port {port} of {HOST} can't be used: {error.strerror}. Choose another --port (0: any free one)"
        ) from None
    return bound


def serve_runs(
    runs: Sequence[RunView], port: int | None, say: Callable[[str], None], *, open_browser: bool
) -> None:
    token = secrets.token_urlsafe(16)
    bound = listen(port)
    url = f"http://{HOST}:{bound.getsockname()[1]}/?token={token}"
    threading.Thread(target=runs[0].info, name="first look", daemon=True).start()
    server = make_server(runs, token)

    def end(*_: object) -> None:
        server.should_exit = True

    # From the moment that the address is printed; an exception could be lost in whatever runs just then.
    before = signal.signal(signal.SIGTERM, end)
    try:
        with suppress(KeyboardInterrupt):
            say(f"{runs[0].id if len(runs) == 1 else f'{len(runs)} runs'} at {url}\nCtrl-C ends it")
            if open_browser:
                threading.Thread(target=webbrowser.open, args=(url,), name="browser", daemon=True).start()
            server.run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, before)


def make_server(runs: Sequence[RunView], token: str) -> uvicorn.Server:
    """Return a server over these runs. It ends when its `should_exit` is set."""
    app = make_app(runs, token, lambda: server.should_exit)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S)
    server = uvicorn.Server(config)
    return server


@contextmanager
def view_beside(folders: Sequence[Path], port: int | None = None) -> Iterator[str]:
    """Serve a page over runs in a separate process that ends with this one. Yields its address."""
    token = secrets.token_urlsafe(16)
    with listen(port) as bound:
        server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(bound.fileno()), *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[bound.fileno()],
            start_new_session=True,  # Ctrl-C is for the training; this process ends with it
            text=True,
        )
        url = f"http://{HOST}:{bound.getsockname()[1]}/?token={token}"
    assert server.stdin is not None
    try:
        with suppress(BrokenPipeError):
            server.stdin.write(f"{token}\n")
            server.stdin.flush()
        yield url
    finally:
        with suppress(BrokenPipeError):
            server.stdin.close()
        try:
            server.wait(_END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(_END_S)


def _serve_beside(number: int, folders: Sequence[Path]) -> None:
    """Serve until standard input ends: the process of `view_beside`."""
    os.nice(10)  # training comes first
    server = make_server(name_runs(folders), sys.stdin.readline().strip())

    def end_with_parent() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end_with_parent, name="end with parent", daemon=True).start()
    server.run(sockets=[socket.socket(fileno=number)])


if __name__ == "__main__":
    _serve_beside(int(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
