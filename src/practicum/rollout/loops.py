"""Agent loops: what happens in a session. A loop is `async def loop(session) -> list[Trajectory]`."""

from __future__ import annotations

import importlib
import inspect

from practicum.errors import RecipeError
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
    module_name, colon, function_name = name.partition(":")
    if not colon:
        known = ", ".join(LOOPS)
        raise RecipeError("rollout.loop", name, f"one of {known}, or package.module:function")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise RecipeError("rollout.loop", name, "an importable function", str(error)) from error
    if not inspect.iscoroutinefunction(function):
        raise RecipeError("rollout.loop", name, "a coroutine function", "declare it `async def`")
    return function
