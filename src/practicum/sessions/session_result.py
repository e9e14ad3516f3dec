"""What an agent loop returns: trajectories, and perhaps what they are worth."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

from practicum.errors import SessionError
from practicum.sessions.session import Session
from practicum.sessions.trajectory import Trajectory
from practicum.user_code import repr_of, type_name

Loop = Callable[[Session], Awaitable[Any]]
"""Returns None (all trajectories that have sampled tokens), a trajectory, a list of them, or one of these
with a reward: a number for the session, or a list with one number for each trajectory."""

_EXPECTED = "expected None, a Trajectory, a list of them, or (trajectories, reward)"


@dataclass(frozen=True, slots=True)
class SessionResult:
    """A session's trajectories in order, all with sampled tokens, and its reward if the loop gave one."""

    trajectories: list[Trajectory]
    reward: float | list[float] | None = None

    def row_rewards(self) -> list[float] | list[None]:
        """What each trajectory earned; a reward of the whole session is earned by the last one."""
        if self.reward is None:
            return [None] * len(self.trajectories)
        if isinstance(self.reward, list):
            return self.reward
        return [0.0] * (len(self.trajectories) - 1) + [self.reward]


def read_result(result: object, session: Session) -> SessionResult:
    """What the loop returned for the session; a SessionError if it is not what a loop may return."""
    is_pair = issubclass(type(result), tuple) and len(cast(tuple[Any, ...], result)) == 2
    returned, reward = cast(tuple[Any, Any], result) if is_pair else (result, None)
    listed = _listed(returned, session)
    if isinstance(reward, list) and len(reward) != len(listed):
        raise SessionError(f"returned {len(reward)} rewards for {len(listed)} trajectories")
    kept = [t for t in listed if t.sampled_tokens]
    if not kept:
        raise SessionError(_nothing_sampled(session))
    if reward is not None and not isinstance(reward, list):
        return SessionResult(kept, _number(reward))
    if reward is not None:
        for trajectory, value in zip(listed, reward, strict=True):
            trajectory.reward = _number(value)
    return SessionResult(kept, _own_rewards(listed))


def _nothing_sampled(session: Session) -> str:
    """Why the model wrote nothing."""
    full = next((t for t in session.trajectories if t.finish == "context"), None)
    if full is not None:
        return f"had no room for an answer: prompt of {len(full)} tokens, context {session.context}"
    return "left no trajectory with sampled tokens"


def _listed(returned: object, session: Session) -> list[Trajectory]:
    opened = session.trajectories
    if returned is None:
        return [t for t in opened if t.sampled_tokens]
    listed: list[Trajectory] = []
    for item in returned if isinstance(returned, list) else [returned]:
        if not isinstance(item, Trajectory):
            raise SessionError(f"returned a {type_name(item)}; {_EXPECTED}")
        if not any(item is t for t in opened):
            raise SessionError("returned a trajectory that its session did not open")
        listed.append(item)
    if len({id(item) for item in listed}) < len(listed):
        raise SessionError("returned the same trajectory twice")
    return listed


def _own_rewards(listed: list[Trajectory]) -> list[float] | None:
    """The trajectories' own rewards, if they have them."""
    rewarded = [t for t in listed if t.reward is not None]
    if not rewarded:
        return None
    if any(not t.sampled_tokens for t in rewarded):
        raise SessionError("rewarded a trajectory without sampled tokens")
    kept = [t for t in listed if t.sampled_tokens]
    if len(rewarded) < len(kept):
        raise SessionError(
            f"rewarded {len(rewarded)} of {len(kept)} trajectories: reward each of them, or the session"
        )
    return [_number(t.reward) for t in kept]


def _number(reward: object) -> float:
    if isinstance(reward, Real) and math.isfinite(reward):
        return float(reward)
    raise SessionError(f"returned the reward {repr_of(reward)}; expected a finite number")
