"""Who a row is (Key) and what the controller knows of it (Tags)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Status = Literal["ready", "failed"]


class Key(NamedTuple):
    """Identity of a row: prompt uid (position in the prompt stream), session, trajectory."""

    prompt: int
    session: int = 0
    trajectory: int = 0

    def __str__(self) -> str:
        return f"prompt {self.prompt}/session {self.session}/trajectory {self.trajectory}"


@dataclass(frozen=True, slots=True)
class Tags:
    """Small typed facts about a row that the controller decides by.

    Change with dataclasses.replace.
    """

    status: Status = "ready"
    prompt_tokens: int = 0
    response_tokens: int = 0
    sampled_tokens: int = 0
    version_min: int = 0
    version_max: int = 0
    domain: str = ""
    task: str = ""
    teacher: str | None = None
    finish: str = ""
    reward: float | None = None
    is_baseline: bool = False
    is_padding: bool = False
    failure: str | None = None
