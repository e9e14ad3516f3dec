"""Whether a run waits, trains, has ended or died, from what its folder says."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from practicum import __version__

Kind = Literal["waiting", "live", "done", "interrupted", "died", "lost"]
QUIET_S = 120.0
"""Without the process's number, a run that has written nothing for so long is taken to be gone."""


@dataclass(frozen=True, slots=True)
class RunState:
    """How a run stands, with a sentence for people."""

    kind: Kind
    sentence: str


def run_state(folder: Path, versions: Mapping[str, Any]) -> RunState:
    """How the last start of the run stands."""
    starts = versions.get("starts") or []
    if not versions:
        return RunState("waiting", "The run has not started yet: this page fills as soon as it does.")
    if not starts:
        if _is_quiet(folder):
            return RunState("lost", "This run never came to its first step; log.txt may say why.")
        return RunState("waiting", "The run is starting: models are loaded, the first evaluation runs.")
    last = starts[-1]
    outcome, step = last.get("outcome"), last.get("last_step")
    if outcome == "done":
        return RunState("done", f"done after {step} steps, {last.get('ended')}")
    if outcome == "interrupted":
        return RunState("interrupted", f"stopped after step {step}: practicum train … --resume continues it")
    if outcome:
        return RunState("died", f"{outcome} (after step {step})")
    if _is_alive(folder, last):
        return RunState("live", "training")
    return RunState(
        "lost",
        "The run ended without saying why: it was killed, or the machine went down. --resume continues it",
    )


def version_problem(versions: Mapping[str, Any]) -> str | None:
    """A sentence if another version of practicum wrote the run."""
    wrote = versions.get("practicum")
    if wrote in (None, __version__):
        return None
    return (
        f"This run was written by practicum {wrote}, this is {__version__}: what the two call differently is "
        "left out."
    )


def _is_alive(folder: Path, start: Mapping[str, Any]) -> bool:
    pid, host = start.get("pid"), start.get("host")
    if isinstance(pid, int) and host == socket.gethostname():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    return not _is_quiet(folder)


def _is_quiet(folder: Path) -> bool:
    files = [folder / name for name in ("metrics.jsonl", "log.txt", "versions.json")]
    newest = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    return time.time() - newest > QUIET_S
