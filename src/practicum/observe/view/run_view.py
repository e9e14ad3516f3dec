"""One run as the page shows it: what its folder holds, read on as it grows, as plain data."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from practicum import __version__
from practicum.checks.learning import MANY, SEVERAL, Finding, Signal, findings, gradient_shares
from practicum.checks.watch import CHECKS, WARN_ONLY
from practicum.errors import RecipeError
from practicum.observe.metrics import describe_metric
from practicum.observe.records.json_files import (
    LineFile,
    find_rows,
    look_up,
    mapping,
    read_mapping,
    read_rows,
    read_versions,
)
from practicum.observe.records.read_record import Record
from practicum.observe.view.recorded_pages import TokenTexts, stages_around, token_page, trajectory_tree
from practicum.observe.view.run_tables import MetricTable, SessionTable
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.text import yamlfile
from practicum.recipe.text.origins import leaves

LOG_BYTES = 400_000
"""The end of log.txt that is shown."""
PREVIEW = 400
"""Characters of an answer in a table."""
RECENT = 20
"""Steps whose mean duration tells how long the rest will take."""
QUIET_S = 120.0
"""Without the process's number, a run that has written nothing for so long is taken to be gone."""


class RunView:
    """Reads a run folder. Each method returns JSON-ready data. `refresh` reads what is new in the files."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.id = path, name
        self.metrics = MetricTable()
        self.sessions = {"samples": SessionTable(), "eval": SessionTable()}
        self.lock = threading.RLock()
        self._record: Record | None = None
        self._token_texts: TokenTexts | None = None
        self._recipe: tuple[Any, dict[str, Any]] = (None, {})
        self._files = {
            name: LineFile(path / f"{name}.jsonl", table.add, table.clear)
            for name, table in {"metrics": self.metrics, **self.sessions}.items()
        }

    @contextmanager
    def fresh(self, *kinds: str) -> Iterator[None]:
        """Hold the lock, with what was written to metrics.jsonl, samples.jsonl or eval.jsonl read so far."""
        with self.lock:
            for kind in kinds:
                self._files[kind].refresh()
            yield

    def stamp(self) -> list[Any]:
        """Return what changes whenever something of the run has changed."""
        names = ("metrics.jsonl", "samples.jsonl", "eval.jsonl", "log.txt", "versions.json", "recipe.yaml")
        record = sorted((self.path / "record").glob("*.jsonl"))
        return [_size_and_time(path) for path in (*(self.path / name for name in names), *record)]

    def info(self) -> dict[str, Any]:
        """Return what the page needs before anything else."""
        with self.fresh("metrics"):
            versions, recipe, checks = read_versions(self.path), self.recipe(), self._checks()
            names = self.metrics.names
            kind, sentence = run_state(self.path, versions)
            return {
                "id": self.id,
                "state": {"kind": kind, "sentence": sentence},
                "problems": self._problems(versions),
                "step": self.metrics.steps[-1] if self.metrics.steps else 0,
                "steps": look_up(recipe, "train.steps"),
                **self._speed(look_up(recipe, "train.steps")),
                "checks": checks,
                "names": names,
                "about": {name: about for name in names if (about := describe_metric(name))},
                "last": self.metrics.last,
                "domains": self._named("domain/", "eval/greedy/", "reward/mean/"),
                "teachers": self._named("teacher/"),
                "expected": {name: look_up(recipe, f"expected.{name}") for name in ("metric", "at_least")},
                "advisories": self._advisories(checks),
                "record": str(look_up(recipe, "track.record") or ""),
            }

    def recipe(self) -> dict[str, Any]:
        """Return the resolved recipe as plain data, or nothing if it can't be read yet."""
        path = self.path / "recipe.yaml"
        stamp = _size_and_time(path)
        if stamp != self._recipe[0]:
            try:
                self._recipe = (
                    stamp,
                    mapping(yamlfile.parse(path.read_text(encoding="utf-8"), str(path)).data),
                )
            except (OSError, ValueError, RecipeError):
                self._recipe = stamp, {}
        return self._recipe[1]

    def _problems(self, versions: Mapping[str, Any]) -> list[str]:
        """Return what of the folder can't be shown, a sentence each."""
        wrote, sentences = versions.get("practicum"), list[str]()
        if wrote not in (None, __version__):
            sentences.append(
                f"This run was written by practicum {wrote}, this is {__version__}: what the two call "
                "differently is left out."
            )
        for name, file in self._files.items():
            if file.broken:
                sentences.append(f"{name}.jsonl: {file.broken} lines that are no JSON are left out.")
        if self._record is not None:
            sentences += self._record.problems[:3]
        if versions and not self.recipe():
            sentences.append("recipe.yaml is missing or can't be read: what depends on it is left out.")
        return sentences

    def _speed(self, steps: Any) -> dict[str, float | None]:
        recent = self.metrics.column("time/step")[1][-RECENT:]
        each = fmean(recent) if recent else None
        done = self.metrics.steps[-1] if self.metrics.steps else 0
        left = each * max(0, steps - done) if each is not None and isinstance(steps, int) else None
        return {"seconds_per_step": each, "seconds_left": left}

    def _checks(self) -> list[dict[str, Any]]:
        """Return each check with its level, how often it has fired in the newest step, and in all."""
        level, own = (look_up(self.recipe(), f"checks.{key}") for key in ("level", "own"))
        names = sorted(CHECKS) if level in ("error", "warn", "off") else []
        names += [str(use).rpartition(":")[2] for use in own] if isinstance(own, list) else []
        newest = self.metrics.at(self.metrics.steps[-1]) if self.metrics.steps else {}
        return [
            {
                "name": name,
                "level": "warn" if level == "error" and name in WARN_ONLY else str(level),
                "fired": newest.get(f"checks/{name}", 0),
                "in_all": sum(self.metrics.column(f"checks/{name}")[1]),
            }
            for name in names
        ]

    def _advisories(self, checks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return checks that fired in the newest step, then what the rules of checks/learning.py find."""
        said = "fired in the newest step: see the log"
        found = [
            Finding(f"check {name}", f"check {name} {said}", f"checks/{name}", level="alarm")
            for name in (check["name"] for check in checks if check["fired"])
        ]
        try:
            signal = Signal.of(Recipe.model_validate(self.recipe()))
        except ValidationError:  # of another version, or damaged
            return [asdict(one) for one in found]
        steps = [step for step in self.metrics.steps if step > 0]
        rows = [self.metrics.at(step) for step in sorted({*steps[:SEVERAL], *steps[-MANY:]})]
        if rows:  # shares are not measured in every step
            shares = {name: value for name, value in self.metrics.last.items() if name.endswith("_share")}
            rows[-1] = shares | rows[-1]
        return [asdict(one) for one in [*found, *findings(rows, signal)]]

    def series(self, names: Sequence[str], first: float, last: float) -> dict[str, Any]:
        """Return curves between two steps by name."""
        with self.fresh("metrics"):
            return {name: self.metrics.series(name, first, last) for name in names}

    def rows(self, kind: str, after: int = 0) -> dict[str, Any]:
        """Return recorded sessions from a row on, in columns."""
        with self.fresh(kind):
            return self.sessions[kind].after(after) | {"generation": self._files[kind].generation}

    def texts(self, kind: str, rows: Sequence[int]) -> dict[int, dict[str, str]]:
        """Return the beginning of prompts and answers of some rows."""
        with self.lock:
            known = [row for row in rows if 0 <= row < len(self.sessions[kind].places)]
            lines = {row: self._line(kind, row) for row in known}
        shown = ("prompt", "response", "failure", "expected")
        return {
            row: {name: _as_text(line.get(name) or "")[:PREVIEW] for name in shown}
            for row, line in lines.items()
        }

    def search(self, kind: str, text: str) -> list[int]:
        """Return the numbers of the rows whose turns, expected answer or failure have a text, in any case."""
        with self.fresh(kind):
            return find_rows(self.path / f"{kind}.jsonl", self.sessions[kind].places, text)

    def group(self, kind: str, step: int, prompt: int) -> list[dict[str, Any]]:
        """Return the sessions of a group, whole."""
        with self.fresh(kind):
            return [self._line(kind, row) for row in self.sessions[kind].groups.get((step, prompt), [])]

    def newest_group(self) -> list[dict[str, Any]]:
        """Return the group that was recorded last."""
        with self.fresh("samples"):
            newest = next(reversed(self.sessions["samples"].groups), None)
            return [] if newest is None else self.group("samples", *newest)

    def record(self) -> Record | None:
        """Return the run's record, with what was added since, or None before the run has begun."""
        with self.lock:
            if self._record is not None:
                self._record.refresh()
            elif read_versions(self.path):
                self._record = Record(self.path)
            return self._record

    def session(self, kind: str, step: int, prompt: int, session: int) -> dict[str, Any]:
        """Return a session as people read it, the sessions of its group, and its trajectories."""
        lines = {line.get("session", 0): line for line in self.group(kind, step, prompt)}
        record = self.record() if kind == "samples" else None
        with self.lock:
            tree = [] if record is None else trajectory_tree(record, step, (prompt, session))
        return {"line": lines.get(session), "group": list(lines), "trajectories": tree}

    def tokens(self, step: int, *key: int) -> dict[str, Any]:
        """Return a recorded row token by token, or why it is missing."""
        record = self.record()
        with self.lock:
            self._token_texts = self._token_texts or TokenTexts.of_run(self.path)
            texts = self._token_texts or TokenTexts(None)
            page = None if record is None else token_page(record, texts, step, key)
        kept = look_up(self.recipe(), "track.record")
        missing = f"This row is not in the record: track.record is {kept}, all keeps every row."
        return page or {"missing": missing}

    def step(self, step: int) -> dict[str, Any]:
        """Return the stages of a step, its plan and its metrics. Step 0 is the newest."""
        record = self.record()
        with self.fresh("metrics"):
            steps = [number for number in self.metrics.steps if number > 0]
            wanted = step if step > 0 else (steps[-1] if steps else 0)
            return {
                "step": wanted,
                "steps": [steps[0], steps[-1]] if steps else None,
                "spans": [] if record is None else [asdict(span) for span in stages_around(record, wanted)],
                "plan": read_mapping(self.path / "plan.json") or None,
                "metrics": self.metrics.at(wanted),
            }

    def teachers(self) -> dict[str, Any]:
        """Return what each teacher is, its target share, and the scores of all models by domain."""
        with self.fresh("metrics"):
            recipe, first, last = self.recipe(), self.metrics.at(0), self.metrics.last
        teachers, targets = mapping(recipe.get("teachers")), mapping(look_up(recipe, "route.shares"))
        shares = gradient_shares([last], targets)
        exam = {n: _by_domain(row) for n, row in read_mapping(self.path / "scores.json").items()}
        scores = {f"teacher {name}" if name in teachers else name: row for name, row in exam.items()}
        own = {"before training": first, "student": last}
        scores = scores or {name: _by_domain(row) for name, row in own.items()}
        return {
            "teachers": {name: _source(mapping(teacher)) for name, teacher in teachers.items()},
            "targets": {name: target for name, (_, target) in shares.items()},
            "set": bool(targets),
            "scores": {name: row for name, row in scores.items() if row},
        }

    def recipe_page(self) -> dict[str, Any]:
        """Return every value of the recipe with its origin, changes of resumed runs, and versions."""
        return {
            "leaves": [[path, _as_text(value)] for path, value in leaves(self.recipe())],
            "origins": read_mapping(self.path / "origins.json"),
            "changes": read_rows(self.path / "changes.jsonl"),
            "versions": read_versions(self.path),
        }

    def log(self) -> dict[str, Any]:
        path = self.path / "log.txt"
        if not path.exists():
            return {"text": "", "left_out": 0}
        with path.open("rb") as file:
            skipped = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
            file.seek(skipped)
            return {"text": file.read(LOG_BYTES).decode("utf-8", errors="replace"), "left_out": skipped}

    def _line(self, kind: str, row: int) -> dict[str, Any]:
        position, length = self.sessions[kind].places[row]
        with self._files[kind].path.open("rb") as file:
            file.seek(position)
            return json.loads(file.read(length))

    def _named(self, *prefixes: str) -> list[str]:
        """Return the names of teachers or domains, from the names of metrics."""
        named = [(name, prefix) for name in self.metrics.names for prefix in prefixes]
        return sorted({name.removeprefix(p).split("/")[0] for name, p in named if name.startswith(p)})


def run_state(folder: Path, versions: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state of a run's last start, as a word and as a sentence."""
    if not versions:
        return "waiting", "The run has not started yet: this page fills as soon as it does."
    files = [folder / name for name in ("metrics.jsonl", "log.txt", "versions.json")]
    newest = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    is_quiet = time.time() - newest > QUIET_S
    if not (starts := versions["starts"]):
        if is_quiet:
            return "lost", "This run never came to its first step; log.txt may say why."
        return "waiting", "The run is starting: models are loaded, the first evaluation runs."
    last = starts[-1]
    outcome, step, pid = last.get("outcome"), last.get("last_step"), last.get("pid")
    if outcome == "done":
        return "done", f"done after {step} steps, {last.get('ended')}"
    if outcome == "interrupted":
        return "interrupted", f"stopped after step {step}: practicum train … --resume continues it"
    if outcome:
        return "died", f"{outcome} (after step {step})"
    is_here = isinstance(pid, int) and last.get("host") == socket.gethostname()
    if _is_running(pid) if is_here else not is_quiet:
        return "live", "training"
    return "lost", "The run was killed, or its machine went down. --resume continues it"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def _source(teacher: Mapping[str, Any]) -> str:
    """Return what a teacher is: the model, adapter or address that the recipe names, and where it lives."""
    facts = [f"{key} {teacher[key]}" for key in ("model", "adapter", "url", "placement") if teacher.get(key)]
    facts += ["a copy of the student"] if teacher.get("student") is not None else []
    return ", ".join(facts)


def _by_domain(row: Any) -> dict[str, float]:
    prefix, scores = "eval/greedy/", mapping(row).items()
    return {name.removeprefix(prefix): score for name, score in scores if name.startswith(prefix)}


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
