"""One run as the page shows it: what its folder holds, read on as it grows, as plain data."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from practicum.recipe.text.origins import leaves
from practicum.records.json_files import (
    LineFile,
    find_rows,
    last_rows,
    look_up,
    mapping,
    read_mapping,
    read_rows,
    read_versions,
)
from practicum.records.read_record import Record
from practicum.view.advisories import Evidence, advisories
from practicum.view.expected_band import expected_band
from practicum.view.metric_table import POINTS, MetricTable, about_metric
from practicum.view.recorded_pages import session_rows, step_page, token_page, trajectory_tree
from practicum.view.run_state import run_state, version_problem
from practicum.view.session_table import SessionTable, group_of
from practicum.view.teacher_page import teacher_page, trained_in
from practicum.view.token_texts import TokenTexts, tokenizer_file

LOG_BYTES = 400_000
"""The end of log.txt that is shown."""
PREVIEW = 400
"""Characters of an answer in a table."""
RECENT = 20
"""Steps whose mean duration tells how long the rest will take."""
TIMED = 200
"""Steps whose times a forecast is compared with, and answers whose prompts it takes the length of."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LEVELS = ("error", "warn", "off")


class RunView:
    """Reads a run folder. Each method gives JSON-ready data; `refresh` reads what is new in the files."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.id = path, name
        self.others: Sequence[RunView] = ()
        """All runs that are open here."""
        self.metrics = MetricTable()
        self.sessions = {"samples": SessionTable(), "eval": SessionTable()}
        self.lock = threading.RLock()
        self._record: Record | None = None
        self._token_texts: TokenTexts | None = None
        self._recipe: tuple[Any, dict[str, Any]] = (None, {})
        self._forecast: tuple[Any, dict[str, Any]] = (None, {})
        self._files = {
            "metrics": LineFile(
                path / "metrics.jsonl", lambda row, *_: self.metrics.add(row), self.metrics.clear
            )
        }
        for kind, table in self.sessions.items():
            self._files[kind] = LineFile(path / f"{kind}.jsonl", table.add, table.clear)

    def refresh(self, *kinds: str) -> None:
        """Read what was written since the last call: of metrics.jsonl, samples.jsonl or eval.jsonl."""
        with self.lock:
            for kind in kinds:
                self._files[kind].refresh()

    def stamp(self) -> list[Any]:
        """Changes whenever something of the run has changed; costs a few looks at files."""
        names = ("metrics.jsonl", "samples.jsonl", "eval.jsonl", "log.txt", "versions.json", "recipe.yaml")
        record = sorted((self.path / "record").glob("*.jsonl"))
        return [_size_and_time(path) for path in (*(self.path / name for name in names), *record)]

    def label(self) -> dict[str, Any]:
        """What a list of runs says of this one; reads no metrics."""
        return {"id": self.id, "name": self._recipe_name() or self.path.name, "path": str(self.path)}

    def _recipe_name(self) -> str:
        """The name alone: of many runs, reading whole recipes takes longer than all else."""
        try:
            with (self.path / "recipe.yaml").open(encoding="utf-8") as file:
                line = next((line for line in file if line.startswith("name:")), "")
            found = yaml.load(line, Loader=_LOADER)
        except (OSError, ValueError, yaml.YAMLError):
            found = None
        named = found if isinstance(found, dict) else self.recipe()
        return str(named.get("name") or "")

    def info(self) -> dict[str, Any]:
        """What the page needs of the run that it shows before anything else."""
        with self.lock:
            self.refresh("metrics")
            return self._info()

    def _info(self) -> dict[str, Any]:
        versions, recipe = read_versions(self.path), self.recipe()
        state = run_state(self.path, versions)
        first = self.metrics.at(0)
        band = expected_band(recipe.get("expected"), first)
        return self.label() | {
            "state": asdict(state),
            "problems": self.problems(versions),
            "step": self.metrics.steps[-1] if self.metrics.steps else 0,
            "steps": look_up(recipe, "train.steps"),
            **self.speed(recipe),
            "checks": self.checks(recipe),
            "names": self.metrics.names,
            "about": {name: about for name in self.metrics.names if (about := about_metric(name))},
            "last": {name: _finite(value) for name, value in self.metrics.last.items()},
            "domains": self._named("domain", "eval/greedy", "reward/mean"),
            "teachers": self._named("teacher"),
            "expected": {"text": recipe.get("expected"), "band": None if band is None else asdict(band)},
            "advisories": [asdict(advisory) for advisory in self.advisories(recipe)],
            "record": str(look_up(recipe, "track.record") or ""),
        }

    def recipe(self) -> dict[str, Any]:
        """The resolved recipe as plain data; nothing if it is not there yet or can't be read."""
        path = self.path / "recipe.yaml"
        stamp = _size_and_time(path)
        if stamp != self._recipe[0]:
            try:
                found = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
            except (OSError, ValueError, yaml.YAMLError):
                found = None
            self._recipe = stamp, found if isinstance(found, dict) else {}
        return self._recipe[1]

    def problems(self, versions: Mapping[str, Any]) -> list[str]:
        """What of the folder can't be shown, a sentence each."""
        found = [version_problem(versions)]
        for name, file in self._files.items():
            if file.broken:
                lines = "1 line is" if file.broken == 1 else f"{file.broken} lines are"
                found.append(
                    f"{name}.jsonl: {lines} no JSON and left out: was the run killed while it wrote?"
                )
        if self._record is not None:
            found += self._record.problems[:3]
        if versions and not self.recipe():
            found.append("recipe.yaml is missing or can't be read: what depends on it is left out.")
        return [sentence for sentence in found if sentence]

    def speed(self, recipe: Mapping[str, Any]) -> dict[str, float | None]:
        """Seconds of a step, and those that are left."""
        recent = self.metrics.column("time/step")[1][-RECENT:]
        each = fmean(recent) if recent else None
        steps = look_up(recipe, "train.steps")
        done = self.metrics.steps[-1] if self.metrics.steps else 0
        left = each * max(0, steps - done) if each is not None and isinstance(steps, int) else None
        return {"seconds_per_step": each, "seconds_left": left}

    def checks(self, recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Each check with its level, how often it has fired in the newest step, and in all."""
        levels = mapping(recipe.get("checks"))
        named = {name: level for name, level in levels.items() if level in LEVELS}
        own = levels.get("own")
        for one in own if isinstance(own, list) else ():
            named[str(mapping(one).get("use")).rpartition(":")[2]] = str(mapping(one).get("level"))
        newest = self.metrics.at(self.metrics.steps[-1]) if self.metrics.steps else {}
        return [
            {
                "name": name,
                "level": level,
                "fired": newest.get(f"checks/{name}", 0),
                "in_all": sum(self.metrics.column(f"checks/{name}")[1]),
            }
            for name, level in named.items()
        ]

    def advisories(self, recipe: Mapping[str, Any]) -> list[Any]:
        """What to look at next."""
        answers = last_rows(self.path / "samples.jsonl")
        lines = [line["text"] for line in self.log()["lines"]]
        said = [text.removeprefix("warning: ") for text in lines if text.startswith("warning: ")]
        return advisories(Evidence(self.metrics, recipe, answers, list(dict.fromkeys(said))[-3:]))

    def series(
        self, names: Sequence[str], first: int | None = None, last: int | None = None, points: int = POINTS
    ) -> dict[str, Any]:
        """Curves by name."""
        self.refresh("metrics")
        with self.lock:
            return {name: self.metrics.series(name, first, last, points) for name in names}

    def rows(self, kind: str, after: int = 0) -> dict[str, Any]:
        """Recorded sessions from a row on, in columns."""
        self.refresh(kind)
        with self.lock:
            found = self.sessions[kind].after(after)
            return found | {"generation": self._files[kind].generation}

    def texts(self, kind: str, rows: Sequence[int]) -> dict[int, dict[str, str]]:
        """The beginning of prompts and answers of some rows."""
        with self.lock:
            known = [row for row in rows if 0 <= row < len(self.sessions[kind])]
            lines = {row: self._line(kind, row) for row in known}
        return {
            row: {what: str(line.get(what) or "")[:PREVIEW] for what in ("prompt", "response", "failure")}
            | {"expected": _shown(line.get("expected"))[:PREVIEW]}
            for row, line in lines.items()
        }

    def search(self, kind: str, text: str) -> list[int]:
        """Numbers of the rows whose prompt, answer, expected answer or failure has a text, in any case."""
        self.refresh(kind)
        with self.lock:
            places = self.sessions[kind].places
            return find_rows(self.path / f"{kind}.jsonl", places, text)

    def group(self, kind: str, step: int, prompt: int) -> list[dict[str, Any]]:
        """The sessions of a group, whole."""
        self.refresh(kind)
        with self.lock:
            return [self._line(kind, row) for row in self.sessions[kind].group(step, prompt)]

    def newest_group(self) -> list[dict[str, Any]]:
        """The group that was recorded last."""
        rows = last_rows(self.path / "samples.jsonl")
        return [row for row in rows if group_of(row) == group_of(rows[-1])]

    def record(self) -> Record | None:
        """The run's record, with what was added since; None before the run has begun."""
        with self.lock:
            if self._record is None:
                if not read_versions(self.path):
                    return None
                self._record = Record(self.path)
            else:
                self._record.refresh()
            return self._record

    def session(self, kind: str, step: int, prompt: int, session: int) -> dict[str, Any]:
        """A session as people read it, its trajectories, and its neighbours in the table."""
        self.refresh(kind)
        record = self.record() if kind == "samples" else None
        with self.lock:
            table = self.sessions[kind]
            number = table.row_of(step, prompt, session)
            group = [table.columns["session"][row] for row in table.group(step, prompt)]
            line = None if number is None else self._line(kind, number)
            rows = [] if record is None else session_rows(record, step, prompt, session)
            tree = [] if record is None else trajectory_tree(record, rows)
        return {"line": line, "group": group, "trajectories": tree}

    def tokens(self, step: int, key: tuple[int, int, int]) -> dict[str, Any]:
        """A recorded row token by token; what is not recorded is said in a sentence."""
        record = self.record()
        with self.lock:
            page = None if record is None else token_page(record, self._texts(), step, key)
        if page is None:
            return {"missing": self._why_no_tokens()}
        return page

    def step(self, step: int) -> dict[str, Any]:
        """The stages of a step, its plan and its metrics."""
        self.refresh("metrics")
        record = self.record()
        with self.lock:
            steps = [number for number in self.metrics.steps if number > 0]
            wanted = step if step > 0 else (steps[-1] if steps else 0)
            page = step_page(record, self.path, wanted)
            metrics = {name: _finite(value) for name, value in self.metrics.at(wanted).items()}
        return page | {"metrics": metrics, "steps": [steps[0], steps[-1]] if steps else None}

    def forecast(self) -> dict[str, Any]:
        """Seconds of the stages as forecast and as measured; made again when there are more steps."""
        self.refresh("metrics")
        stamp = _size_and_time(self.path / "recipe.yaml"), self.metrics.steps[-1:]
        if self._forecast[0] != stamp:
            self._forecast = stamp, self._make_forecast()
        return self._forecast[1]

    def _make_forecast(self) -> dict[str, Any]:
        prompts = [row.get("prompt_tokens") for row in last_rows(self.path / "samples.jsonl", TIMED)]
        with self.lock:
            rows = [self.metrics.at(step) for step in self.metrics.steps[-TIMED:]]
        known = [tokens for tokens in prompts if tokens]
        if not known:
            return {"sentence": "No forecast: it takes the lengths of prompts from recorded answers."}
        from practicum.view.forecast_page import forecast_page  # imports more than all else here

        return forecast_page(self.recipe(), fmean(known), rows, self._directory())

    def _texts(self) -> TokenTexts | None:
        if self._token_texts is None and (path := tokenizer_file(self.path)) is not None:
            self._token_texts = TokenTexts(path)
        return self._token_texts

    def _why_no_tokens(self) -> str:
        kept = look_up(self.recipe(), "track.record")
        if kept in (0, "none"):
            return "This run records no rows: track.record is none. A number of groups, or all, keeps them."
        return (
            f"This row is not in the record: track.record is {kept}, that many groups of each step are kept. "
            "all keeps every row."
        )

    def teachers(self) -> dict[str, Any]:
        """Targets of shares, and the scores of teachers and student by domain, as far as they are known."""
        self.refresh("metrics")
        open_runs = {run.path: run for run in self.others if run is not self}
        places = trained_in(self.recipe(), self._directory(), open_runs)
        for place in places.values():
            open_runs[place].refresh("metrics")
        trained = {name: open_runs[place].metrics for name, place in places.items()}
        return teacher_page(self.path, self.recipe(), self.metrics, trained)

    def _directory(self) -> Path:
        """Where the run was started: relative paths of its recipe begin there."""
        starts = read_versions(self.path).get("starts") or [{}]
        return Path(str(starts[-1].get("directory") or "."))

    def recipe_page(self) -> dict[str, Any]:
        """Every value of the recipe with its origin, changes of resumed runs, and versions."""
        return {
            "leaves": [[path, _shown(value)] for path, value in leaves(self.recipe())],
            "origins": read_mapping(self.path / "origins.json"),
            "changes": read_rows(self.path / "changes.jsonl"),
            "versions": read_versions(self.path),
        }

    def log(self) -> dict[str, Any]:
        """The end of log.txt, line by line: time, text and level."""
        path = self.path / "log.txt"
        if not path.exists():
            return {"lines": [], "left_out": 0}
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            skipped = max(0, size - LOG_BYTES)
            file.seek(skipped)
            text = file.read(LOG_BYTES).decode("utf-8", errors="replace")
        lines = text.splitlines()[1 if skipped else 0 :]
        return {"lines": [_log_line(line) for line in lines], "left_out": skipped}

    def _line(self, kind: str, row: int) -> dict[str, Any]:
        return self._files[kind].line_at(*self.sessions[kind].places[row])

    def _named(self, kind: str, *prefixes: str) -> list[str]:
        """Names of teachers or domains, from the names of metrics."""
        found = {name.split("/")[1] for name in self.metrics.names if name.startswith(f"{kind}/")}
        for prefix in prefixes:
            found |= {n.removeprefix(f"{prefix}/") for n in self.metrics.names if n.startswith(f"{prefix}/")}
        return sorted(found)


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _finite(value: float) -> float | None:
    return value if abs(value) != float("inf") and value == value else None


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _log_line(line: str) -> dict[str, str]:
    time, text = (line[:19], line[20:]) if line[:4].isdigit() and line[19:20] == " " else ("", line)
    level = "plain"
    if text.startswith(("stopped by", "traceback", "Traceback")):
        level = "error"
    elif text.startswith(("warning:", "check ")):
        level = "warning"
    return {"time": time, "text": text, "level": level}
