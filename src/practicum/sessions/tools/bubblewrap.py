"""Bubblewrap: a program with its own processes, network and files.

It sees no process but its own, no network (its loopback is its own), no /proc, four devices, and of the files
those that Python is made of, read-only. It can write to /tmp alone, which is in memory, small and gone at the
end.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache

INSTALL = "apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora)"
FOLDER = "/tmp"
"""The program's folder inside: the only one that it can write to."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/nix/store",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
)


def find_bubblewrap() -> str | None:
    """The command's path, if it is installed."""
    return shutil.which("bwrap")


def isolated(command: Sequence[str], *, files: Sequence[str] = (), space_mb: int) -> list[str]:
    """The command that runs this one in bubblewrap, with these files readable besides Python's.

    `command` begins with `python()`. It ends with code 128 + N if signal N ended the program. Start it in a
    session of its own: --new-session would take the program out of the group that is killed.
    """
    options = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    options += ["--size", str(space_mb << 20), "--tmpfs", FOLDER]  # first: files that are there stay visible
    for device in _DEVICES:
        options += ["--dev-bind", device, device]
    for path in (*_python_files(), *files):
        options += ["--ro-bind-try", path, path]
    options += ["--chdir", FOLDER, "--remount-ro", "/"]
    return [find_bubblewrap() or "bwrap", *options, "--", *command]


@cache
def python() -> str:
    """The interpreter itself: that of a virtual environment is a link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def _python_files() -> tuple[str, ...]:
    """The interpreter, its library, and the system's libraries."""
    prefix = os.path.dirname(os.path.dirname(python()))
    paths = [*_SYSTEM, python(), os.path.join(prefix, "lib"), os.path.join(prefix, "lib64")]
    paths += [os.path.dirname(os.__file__), sysconfig.get_config_var("DESTSHARED") or ""]
    paths += os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return tuple(dict.fromkeys(path for path in paths if os.path.isabs(path)))
