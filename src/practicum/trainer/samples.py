"""Write sessions as rows of samples.jsonl and eval.jsonl, and summarise failures."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from practicum.dataplane.batch import BatchRef, session_tags
from practicum.dataplane.keys import Key, Tags
from practicum.roles.learner_rank import Transcript
from practicum.runtime.start_roles import Roles
from practicum.tasks.prompts import Prompt
from practicum.user_code import shorten, user_lines

Row = tuple[Key, Tags, Transcript]
_COUNTED = ("response_tokens", "sampled_tokens", "turns", "tool_calls", "tool_errors")
"""Tags that are summed over a session's trajectories."""
_REASONS, _TRACES, _LINES, _CHARS = 5, 100, 12, 300
"""Maximum reasons in the summary of failures, tracebacks in the log, and lines of each on the screen."""


class StepSamples:
    """Samples of the current step: texts of its recorded groups, and values of all its sessions."""

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self.answers: list[dict[str, Any]] = []
        self.distributions: dict[str, list[float]] = {}
        self.for_trackers = False
        """True to collect distributions too."""

    def rolled_out(self, step: int, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        """Add the recorded groups of a rollout. A step may have several rollouts."""
        self.answers += describe(step, self.roles, batch.where(lambda _, tags: tags.recorded), prompts)
        if self.for_trackers:
            ready = [tags for tags in session_tags(batch) if tags.status == "ready"]
            self._add("sessions/reward", [tags.reward for tags in ready if tags.reward is not None])
            self._add("sessions/response_tokens", [tags.response_tokens for tags in ready])

    def add_advantages(self, batch: BatchRef) -> None:
        part = batch if self.for_trackers else batch.where(lambda _, tags: tags.recorded)
        means = self.roles.session_advantages(part) if part else {}
        for answer in self.answers:
            answer["advantage"] = means.get((answer["group"], answer["session"]))
        if self.for_trackers:
            self._add("sessions/advantage", list(means.values()))

    def clear(self) -> None:
        self.answers, self.distributions = [], {}

    def _add(self, name: str, values: Sequence[float]) -> None:
        if values:
            self.distributions.setdefault(name, []).extend(values)


class Failures:
    """Counts failed sessions by reason, together if reasons differ only in numbers and quoted values. `say`
    receives the first failure of each reason, `log` all failures, and each traceback once."""

    def __init__(self, say: Callable[[str], None], log: Callable[[str], None]) -> None:
        self._say, self._log = say, log
        self._counts = Counter[str]()
        self._first: dict[str, str] = {}
        self._traces: set[str] = set()

    def note(self, batch: BatchRef) -> None:
        """Report the failed sessions of a batch, and tools that raised."""
        noted: set[tuple[int, ...]] = set()
        for key, tags in batch:
            if tags.failure is not None and key[:2] not in noted:
                noted.add(key[:2])
                self._log(f"failed: {key}: {tags.failure}")
                self._counts[self._report(f"failed: {key}: ", tags.failure, tags.trace)] += 1
            elif tags.failure is None and tags.trace is not None:
                self._report(f"a tool in {key} raised ", tags.trace.splitlines()[-1], tags.trace)
            if tags.trace is not None and tags.trace not in self._traces and len(self._traces) < _TRACES:
                self._traces.add(tags.trace)
                self._log(f"traceback of {key}:\n{tags.trace}")

    def _report(self, whose: str, reason: str, trace: str | None) -> str:
        """Print a new reason with the end of its traceback, and return its kind."""
        kind = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "#", reason)
        if kind not in self._first:
            self._first[kind] = reason
            end = [shorten(line, _CHARS) for line in user_lines(trace or "")[-_LINES:]]
            self._say("\n".join([f"{whose}{reason}", *end]))
        return kind

    def summary(self) -> list[str]:
        """Return messages with the number of failed sessions by reason, the most frequent first."""
        ordered = self._counts.most_common()
        lines = [f"failed {count}×: {self._first[kind]}" for kind, count in ordered[:_REASONS]]
        if rest := ordered[_REASONS:]:
            count = sum(count for _, count in rest)
            lines.append(f"failed {count}×: for {len(rest)} other reasons, see log.txt")
        return lines


def mean_by_name(named: Iterable[tuple[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for name, value in named:
        values.setdefault(name, []).append(value)
    return {name: statistics.fmean(each) for name, each in values.items()}


def choose_prompts(tasks: Mapping[int, str], count: int | None, turn: int = 0) -> set[int]:
    """Return `count` of these prompts, or all if `count` is None. `tasks` has the task of each uid. The tasks
    take turns in order of their names, starting with number `turn`. Prompts of a task are in order."""
    by_task: dict[str, list[int]] = {}
    for prompt in sorted(tasks):
        by_task.setdefault(tasks[prompt], []).append(prompt)
    places = [
        (place, (number - turn) % len(by_task), prompt)
        for number, task in enumerate(sorted(by_task))
        for place, prompt in enumerate(by_task[task])
    ]
    return {prompt for _, _, prompt in sorted(places)[:count]}


def describe(step: int, roles: Roles, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> list[dict[str, Any]]:
    """Return a row for each session of a batch, in order. The batch must hold all rows of its sessions."""
    sessions: dict[tuple[int, ...], list[Row]] = {}
    for (key, tags), transcript in zip(batch, roles.transcripts(batch), strict=True):
        sessions.setdefault(key[:2], []).append((key, tags, transcript))
    return [_described(step, rows, prompts[rows[0][0]]) for rows in sessions.values()]


def _described(step: int, rows: Sequence[Row], prompt: Prompt) -> dict[str, Any]:
    """Describe a session. The response is its last trajectory, counts are over all trajectories."""
    key, tags, last = rows[-1]
    expected, trajectories = prompt.answer, None
    try:
        json.dumps(expected, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        expected = str(expected)
    if len(rows) > 1 or len(last.spans) > 1:  # otherwise prompt and response suffice
        trajectories = [
            {"prompt": text.prompt, "spans": list(text.spans), "finish": tags.finish}
            for _, tags, text in rows
        ]
    return {
        "step": step,
        "id": f"{step}/{key.prompt}/{key.session}",
        "group": key.prompt,
        "session": key.session,
        "task": tags.task,
        "domain": tags.domain,
        "teacher": tags.teacher,
        "greedy": tags.is_baseline,
        "prompt": last.prompt,
        "response": last.response,
        "expected": expected,
        "reward": tags.reward,
        "parts": tags.reward_parts,
        "advantage": None,
        "prompt_tokens": tags.prompt_tokens,
        **{name: sum(getattr(t, name) for _, t, _ in rows) for name in _COUNTED},
        "finish": tags.finish,
        "version": [min(t.version_min for _, t, _ in rows), max(t.version_max for _, t, _ in rows)],
        "failure": tags.failure,
        "requests": list(tags.clients) or None,
        "trajectories": trajectories,
    }
