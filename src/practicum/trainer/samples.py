"""Answers as people and programs read them: lines of samples.jsonl and eval.jsonl, one for each session."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from practicum.dataplane.batch import BatchRef, session_tags
from practicum.dataplane.keys import Key, Tags
from practicum.roles.transcripts import Transcript
from practicum.runtime.start_roles import Roles
from practicum.tasks.prompts import Prompt
from practicum.user_code import text_of

Row = tuple[Key, Tags, Transcript]
_COUNTED = ("response_tokens", "sampled_tokens", "turns", "tool_calls", "tool_errors")
"""Tags whose sums over a session's trajectories are recorded."""


class StepSamples:
    """What is told of the step under way: texts of its recorded groups, and values of all its sessions."""

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self.answers: list[dict[str, Any]] = []
        self.distributions: dict[str, list[float]] = {}
        self.for_trackers = False
        """Whether distributions are asked for."""

    def rolled_out(self, step: int, batch: BatchRef, prompts: Mapping[Key, Prompt]) -> None:
        """Add the recorded groups of a rollout, of which a step may have several."""
        recorded = batch.where(lambda _, tags: tags.recorded)
        self.answers += describe(step, self.roles, recorded, prompts)
        if self.for_trackers:
            ready = [tags for tags in session_tags(batch) if tags.status == "ready"]
            self._add("sessions/reward", [tags.reward for tags in ready if tags.reward is not None])
            self._add("sessions/response_tokens", [tags.response_tokens for tags in ready])

    def add_advantages(self, batch: BatchRef) -> None:
        """Add the advantages of the batch that is learnt from."""
        part = batch if self.for_trackers else batch.where(lambda _, tags: tags.recorded)
        means = self.roles.session_advantages(part) if part else {}
        for answer in self.answers:
            answer["advantage"] = means.get((answer["group"], answer["session"]))
        if self.for_trackers:
            self._add("sessions/advantage", list(means.values()))

    def clear(self) -> None:
        """Begin another step."""
        self.answers, self.distributions = [], {}

    def _add(self, name: str, values: Sequence[float]) -> None:
        if values:
            self.distributions.setdefault(name, []).extend(values)


def choose_prompts(tasks: Mapping[int, str], count: int | None, turn: int = 0) -> set[int]:
    """`count` of these prompts, or all if there are fewer or `count` is None; `tasks` are theirs by uid.

    The tasks take turns, in the order of their names from number `turn` on; prompts of a task are in order.
    """
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
    """A line for each session of a batch, in its order; the batch has all rows of its sessions."""
    sessions: dict[tuple[int, ...], list[Row]] = {}
    for (key, tags), transcript in zip(batch, roles.transcripts(batch), strict=True):
        sessions.setdefault(key[:2], []).append((key, tags, transcript))
    return [_described(step, rows, prompts[rows[0][0]]) for rows in sessions.values()]


def _described(step: int, rows: Sequence[Row], prompt: Prompt) -> dict[str, Any]:
    """One session: its answer is its last trajectory, counts are of all of them."""
    key, tags, last = rows[-1]
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
        "expected": _as_json(prompt.answer),
        "reward": tags.reward,
        "parts": tags.reward_parts,
        "advantage": None,
        "prompt_tokens": tags.prompt_tokens,
        **{name: sum(getattr(t, name) for _, t, _ in rows) for name in _COUNTED},
        "finish": tags.finish,
        "version": [min(t.version_min for _, t, _ in rows), max(t.version_max for _, t, _ in rows)],
        "failure": tags.failure,
        "trajectories": _trajectories(rows),
    }


def _trajectories(rows: Sequence[Row]) -> list[dict[str, Any]] | None:
    """The session turn by turn; None for an answer of one turn, which `prompt` and `response` show."""
    if len(rows) == 1 and len(rows[0][2].spans) < 2:
        return None
    return [
        {
            "prompt": text.prompt,
            "spans": [{"sampled": s.sampled, "text": s.text, "tokens": s.tokens} for s in text.spans],
            "finish": tags.finish,
        }
        for _, tags, text in rows
    ]


def _as_json(value: Any) -> Any:
    """An expected answer as JSON has it; what JSON does not know is text."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return text_of(value)
    return value
