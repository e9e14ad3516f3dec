"""The path of one GRPO step with one colocated teacher in the local runtime: `python -m tests.walk`.

A real tiny run is traced. It prints the files of the spine in the order in which the step reaches them, the
lines of the functions that ran, and how often the path enters another folder. The spine ends at doors:
rooms whose inside a reader need not know to follow the step. What hooks alone call, for samples and the log,
is behind their door.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import practicum
from practicum.trainer.run import train_loaded
from practicum.trainer.step import StepRunner

from .teachers.tiny_teachers import save_teacher
from .trainer.recipes import tiny

ROOT = Path(practicum.__file__).parent
DOORS = {
    "engines": "the engine",
    "learning": "the learner",
    "algorithms": "the learner's formulas",
    "models": "model objects",
    "places": "the teacher's model",
    "tasks": "prompts and reward functions",
    "rewards": "reward models",
    "teachers": "the ledger and the route",
    "recipe": "settings",
    "checks": "invariants",
    "concurrency": "the event loop",
    "dataplane": "the store, its rows and keys",
    "observe": "progress for people",
    "records": "what is recorded of a step",
    "user_code.py": "sentences on users' code",
    "trainer/run.py": "hooks: samples and the log",
    "trainer/failures.py": "hooks: samples and the log",
    "trainer/samples.py": "hooks: samples and the log",
}
"""Folders and files, each with what is inside."""
HOOKS = {str(ROOT / file) for file, inside in DOORS.items() if inside.startswith("hooks")}


@dataclass(frozen=True)
class Visit:
    """A function that the step reached for the first time."""

    file: str
    name: str
    lines: range


def on_spine(code: CodeType) -> str | None:
    """The function's file below practicum/, if it is on the spine."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or code.co_name.startswith("<"):
        return None
    file = str(path.relative_to(ROOT))
    is_door = file in DOORS or file.split("/")[0] in DOORS
    return None if is_door else file


def by_a_hook(frame: FrameType) -> bool:
    """Whether a hook of the step has led to this call."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_qualname != "StepRunner.step":
        if caller.f_code.co_filename in HOOKS:
            return True
        caller = caller.f_back
    return False


def trace_step() -> list[Visit]:
    """The spine's functions in the order in which the second step of a run first calls them."""
    visits: dict[CodeType, Visit | None] = {}
    whole, tracing = StepRunner.step, threading.Event()

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in visits and tracing.is_set():
            file = on_spine(code)
            if file is None or not by_a_hook(frame):
                visits[code] = None if file is None else Visit(file, code.co_qualname, lines_of(code))

    def traced(self: StepRunner, number: int) -> dict[str, float]:
        if number == 2:
            tracing.set()
        try:
            return whole(self, number)
        finally:
            tracing.clear()

    StepRunner.step = traced
    threading.setprofile(see)  # of the event loop's thread, which starts with the first asynchronous work
    sys.setprofile(see)
    try:
        _run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        StepRunner.step = whole
    return [visit for visit in visits.values() if visit is not None]


def _run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        teacher = {"t": {"model": save_teacher(Path(folder) / "teacher", seed=1)}}
        train = {"steps": 2, "prompts": 2, "minibatches": 2, "lr": 1e-3}
        distill = {"signal": "top_k", "top_k": 4}
        sections = {"teachers": teacher, "distill": distill, "train": train, "eval": {"rows": 1}}
        train_loaded(tiny(Path(folder), **sections), Path(folder) / "run")


def lines_of(code: CodeType) -> range:
    """The lines of a function, by its syntax tree."""
    tree = ast.parse(Path(code.co_filename).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return range(first, (node.end_lineno or first) + 1)
    raise LookupError(code.co_qualname)


def count_lines(visits: Iterable[Visit]) -> int:
    """Lines of these functions, those of one inside of another once."""
    return len({(visit.file, line) for visit in visits for line in visit.lines})


def folder_changes(visits: list[Visit]) -> int:
    """How often a reader who opens files in this order enters another folder."""
    folders = [file.rpartition("/")[0] for file in dict.fromkeys(visit.file for visit in visits)]
    return sum(before != after for before, after in pairwise(folders))


def main() -> None:
    visits = trace_step()
    files = dict.fromkeys(visit.file for visit in visits)
    for number, file in enumerate(files, start=1):
        lines = count_lines(visit for visit in visits if visit.file == file)
        print(f"{number:>3}. {file:<34} {lines:>5} lines")
    print(f"{len(files)} files, {count_lines(visits)} lines, {folder_changes(visits)} changes of folder")


if __name__ == "__main__":
    main()
