"""Agent loops: what happens in a session. A loop is `async def loop(session) -> list[Trajectory]`."""

from __future__ import annotations

import inspect
from difflib import get_close_matches

from practicum.errors import RecipeError
from practicum.recipe.functions import import_function
from practicum.rollout.session import Loop, Session, Trajectory


async def single_turn(session: Session) -> list[Trajectory]:
    """One prompt, one answer."""
    trajectory = session.new_trajectory()
    await session.generate(trajectory)
    return [trajectory]


LOOPS: dict[str, Loop] = {"single_turn": single_turn}


def find_loop(name: str) -> Loop:
    """A built-in loop, or a user's `package.module:function`."""
    if name in LOOPS:
        return LOOPS[name]
    if ":" not in name:
        near = get_close_matches(name, LOOPS, n=1)
        wanted = f"one of {', '.join(LOOPS)}, or package.module:function"
        raise RecipeError("rollout.loop", repr(name), wanted, f"did you mean {near[0]}?" if near else "")
    function = import_function(name, "rollout.loop")
    if not inspect.iscoroutinefunction(function):
        raise RecipeError("rollout.loop", repr(name), "a coroutine function", "declare it `async def`")
    return function
