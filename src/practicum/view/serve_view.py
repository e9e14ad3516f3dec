"""`practicum view`: from the given folders to a page that is served until Ctrl-C."""

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
from practicum.records.json_files import read_mapping
from practicum.view.run_view import RunView
from practicum.view.web_app import make_app

HOST, PORT = "127.0.0.1", 8765
_GRACE_S, _END_S = 3, 6.0
"""Seconds for open pages to let the server go, and for its process to end."""
_DEPTH = 3
"""Folders below ./runs in which runs are looked for."""


def find_runs(folders: Sequence[Path]) -> list[RunView]:
    """The runs of these folders, each a run or a folder of runs; without any, those below ./runs.

    A folder that holds none is a PracticumError that says what was expected.
    """
    if not folders:
        found = _runs_below(Path("runs"))
        if not found:
            raise PracticumError(
                "There is no run in ./runs: `practicum demo` or `practicum train RECIPE` makes one; "
                "`practicum view RUN` opens one that is elsewhere"
            )
    else:
        found = [run for folder in folders for run in _runs_of(folder)]
    return name_runs(found)


def name_runs(folders: Sequence[Path]) -> list[RunView]:
    """Each run with the shortest end of its path that no other has, as a word of an address."""
    paths = list(dict.fromkeys(folder.absolute() for folder in folders))
    runs = [RunView(path, _name(path, paths)) for path in paths]
    for run in runs:
        run.others = runs
    return runs


def _name(path: Path, paths: Sequence[Path]) -> str:
    for length in range(1, len(path.parts)):
        end = path.parts[-length:]
        if sum(other.parts[-length:] == end for other in paths) == 1:
            return "~".join(end)
    return "~".join(path.parts[1:]) or "run"


def _runs_of(folder: Path) -> list[Path]:
    if not folder.exists():
        raise PracticumError(f"{folder} does not exist: expected a run folder, such as runs/NAME")
    if not folder.is_dir():
        raise PracticumError(f"{folder} is a file: expected a run folder, such as runs/NAME")
    if is_run(folder):
        return [folder]
    if not (found := _runs_below(folder)):
        inside = next((parent for parent in folder.absolute().parents if is_run(parent)), None)
        hint = f"; did you mean {inside}?" if inside is not None else ""
        raise PracticumError(
            f"{folder} is no run folder: it has no versions.json, and no folder below it is a run{hint}"
        )
    return found


def _runs_below(folder: Path, depth: int = _DEPTH) -> list[Path]:
    """Runs in a folder, the newest first."""
    if not folder.is_dir() or not depth:
        return []
    found = []
    for inner in sorted(folder.iterdir()):
        if inner.is_dir():
            found += [inner] if is_run(inner) else _runs_below(inner, depth - 1)
    return sorted(found, key=lambda run: -(run / "versions.json").stat().st_mtime)


def is_run(folder: Path) -> bool:
    """Whether a run has been in a folder."""
    return "practicum" in read_mapping(folder / "versions.json")


def listen(port: int | None) -> socket.socket:
    """A socket on this machine alone; without a port the usual one, or any if that is taken."""
    for number in (PORT, 0) if port is None else (port,):
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((HOST, number))
            bound.listen(128)
        except OSError as error:
            bound.close()
            if number == PORT and port is None:
                continue
            raise PracticumError(
                f"port {number} of {HOST} can't be used: {error.strerror}. "
                "Choose another --port (0: any free one)"
            ) from None
        return bound
    raise AssertionError("port 0 is always free")


def address(bound: socket.socket, token: str) -> str:
    """What a browser opens."""
    return f"http://{HOST}:{bound.getsockname()[1]}/?token={token}"


def serve_runs(
    runs: Sequence[RunView], port: int | None, say: Callable[[str], None], *, open_browser: bool
) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    token = secrets.token_urlsafe(16)
    bound = listen(port)
    url = address(bound, token)
    threading.Thread(target=runs[0].info, name="first look", daemon=True).start()
    names = runs[0].id if len(runs) == 1 else f"{len(runs)} runs"
    server = make_server(runs, token)

    def end(*_: object) -> None:
        server.should_exit = True

    # From the moment that the address is printed; an exception could be lost in whatever runs just then.
    before = signal.signal(signal.SIGTERM, end)
    try:
        with suppress(KeyboardInterrupt):
            say(f"{names} at {url}\nCtrl-C ends it")
            if open_browser:
                threading.Thread(target=_open, args=(url,), name="browser", daemon=True).start()
            server.run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, before)


def _open(url: str) -> None:
    with suppress(webbrowser.Error):
        webbrowser.open(url)


def make_server(runs: Sequence[RunView], token: str) -> uvicorn.Server:
    """A server over these runs; it ends when its `should_exit` is set."""
    app = make_app(runs, token, lambda: server.should_exit)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S)
    server = uvicorn.Server(config)
    return server


@contextmanager
def view_beside(folders: Sequence[Path], port: int | None = None) -> Iterator[str]:
    """A page over runs that train meanwhile, served by its own process; its address.

    The process ends with this context, and with this process, however that ends: its standard input closes.
    """
    token = secrets.token_urlsafe(16)
    bound = listen(port)
    with bound:
        os.set_inheritable(bound.fileno(), True)
        server = subprocess.Popen(
            [sys.executable, "-m", "practicum.view.serve_view", str(bound.fileno()), *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[bound.fileno()],
            start_new_session=True,  # Ctrl-C is for the training; this process ends with it
            text=True,
        )
        url = address(bound, token)
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
    """The process of `view_beside`: serves until its standard input ends."""
    with suppress(OSError):
        os.nice(10)  # training comes first
    token = sys.stdin.readline().strip()
    server = make_server(name_runs(folders), token)

    def end_with_parent() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end_with_parent, name="end with parent", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.run(sockets=[socket.socket(fileno=number)])


if __name__ == "__main__":
    _serve_beside(int(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
