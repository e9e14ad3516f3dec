"""What a run was made with: packages, commits, the command line, and when it started and ended."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import practicum

PACKAGES = ("practicum", "torch", "transformers", "numpy", "pydantic", "safetensors")
_GIT_S = 5.0
"""Seconds that git may take; a repository that needs longer is left out."""


def versions() -> dict[str, str]:
    """Packages, Python and the machine."""
    version_of = {name: _version(name) for name in PACKAGES}
    return version_of | {"python": platform.python_version(), "machine": platform.platform()}


def describe_start(recipe: Path) -> dict[str, Any]:
    """One start of a run: its command line and commits, of practicum and of the recipe's folder."""
    package = Path(practicum.__file__)
    return {
        "command": shlex.join(sys.orig_argv),
        "directory": str(Path.cwd()),
        "commits": {"practicum": git_state(package.parent, package.name), "recipe": git_state(recipe.parent)},
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": now(),
        "ended": None,
        "outcome": None,
        "last_step": None,
    }


def now() -> str:
    """The time with its zone."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def git_state(folder: Path, tracked: str | None = None) -> dict[str, Any] | None:
    """The commit of the repository that a folder is in, and whether tracked files differ from it.

    None if there is no git, no repository or no commit; or if the file `tracked` is not part of it: a
    package installed inside of somebody's repository is not of its commits.
    """
    if tracked is not None and _git(folder, "ls-files", "--error-unmatch", tracked) is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if status is None else bool(status)}


def _git(folder: Path, *command: str) -> str | None:
    # A git that calls us (a hook) names its own repository in these variables.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command],
            env=env | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
