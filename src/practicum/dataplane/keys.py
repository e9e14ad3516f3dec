"""A row's identity (Key) and its metadata for the controller (Tags)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Status = Literal["ready", "failed"]
_NAMED = 3
"""Maximum rows that an error names."""


class Key(NamedTuple):
    """Identity of a row: prompt uid (position in the prompt stream), session, trajectory."""

    prompt: int
    session: int = 0
    trajectory: int = 0

    def __str__(self) -> str:
        return f"prompt {self.prompt}/session {self.session}/trajectory {self.trajectory}"


def name_keys(keys: Sequence[Key]) -> str:
    """The first few keys, and how many more there are."""
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(str(key) for key in keys[:_NAMED]) + more


@dataclass(frozen=True, slots=True)
class Tags:
    """Small typed metadata of a row for the controller. Change with dataclasses.replace."""

    status: Status = "ready"
    prompt_tokens: int = 0
    response_tokens: int = 0
    sampled_tokens: int = 0
    shared_tokens: int = 0
    """Sampled tokens that the engine computed for another session, equal so far."""
    version_min: int = 0
    version_max: int = 0
    domain: str = ""
    task: str = ""
    teacher: str | None = None
    finish: str = ""
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    breaks: int = 0
    repetition: float = 0.0
    """Share of repeated runs of tokens at the end of the response."""
    retries: int = 0
    requests: dict[str, int] | None = None
    """Counts of the HTTP requests of the session's agent, on its last row."""
    clients: tuple[str, ...] = ()
    """Path and client of each of them."""
    loop_reward: float | None = None
    """Reward of this trajectory from the agent loop. Trajectories without one are scored."""
    reward: float | None = None
    """The reward of the whole session."""
    reward_parts: dict[str, float] | None = None
    """Unweighted scores of the session from each reward function and model."""
    is_baseline: bool = False
    is_padding: bool = False
    step: int = 0
    """Training step that rolled it out, or 0 in evaluations."""
    recorded: bool = False
    """True if the row is recorded with all its columns."""
    failure: str | None = None
    trace: str | None = None
    """The traceback of user code that raised in this session: reward, loop or tool."""
