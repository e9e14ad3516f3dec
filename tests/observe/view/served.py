"""A page that is served by a thread of this process, and run folders of a few lines."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from practicum.observe.view.run_view import RunView
from practicum.observe.view.serve_view import HOST, listen, make_server, name_runs
from practicum.trainer.run_folder import append_lines, versions

TOKEN = "a-token-of-the-tests"


@contextmanager
def served(folders: Sequence[Path]) -> Iterator[str]:
    """The address of a page over these runs, without its token."""
    with served_runs(name_runs(folders)) as address:
        yield address


@contextmanager
def served_runs(runs: Sequence[RunView]) -> Iterator[str]:
    bound = listen(0)
    server = make_server(runs, TOKEN)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{bound.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(10)


def write_run(
    folder: Path,
    metrics: Sequence[Mapping[str, Any]] = (),
    samples: Sequence[Mapping[str, Any]] = (),
    recipe: Mapping[str, Any] | None = None,
    start: Mapping[str, Any] | None = None,
) -> Path:
    """A run folder as a run leaves it, with these lines."""
    folder.mkdir(parents=True)
    known = {"name": folder.name, "train": {"steps": 4}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(known | dict(recipe or {})))
    write_versions(folder, {"outcome": "done", "last_step": 4} | dict(start or {}))
    append_lines(folder / "metrics.jsonl", metrics)
    append_lines(folder / "samples.jsonl", samples)
    return folder


def write_versions(folder: Path, start: Mapping[str, Any]) -> None:
    (folder / "versions.json").write_text(json.dumps({**versions(), "starts": [start]}))


def sample(step: int, prompt: int, session: int, **more: Any) -> dict[str, Any]:
    """A line of samples.jsonl."""
    return {
        "step": step,
        "group": prompt,
        "session": session,
        "task": "copy",
        "domain": "copy",
        "teacher": None,
        "prompt": f"copy:{prompt}=",
        "response": f"{session}<eos>",
        "expected": "1",
        "reward": float(session),
        "advantage": None,
        "prompt_tokens": 7,
        "response_tokens": 2,
        "sampled_tokens": 2,
        "turns": 1,
        "tool_calls": 0,
        "finish": "stop",
        "failure": None,
        "trajectories": None,
    } | more


def copy_run(run: Path, to: Path) -> Path:
    """The same run elsewhere, without its weights."""
    return shutil.copytree(run, to, ignore=shutil.ignore_patterns("checkpoints", "export"))


def live_start() -> dict[str, Any]:
    """The start of a run that this process is training."""
    return {"pid": os.getpid(), "host": os.uname().nodename, "outcome": None, "last_step": None}
