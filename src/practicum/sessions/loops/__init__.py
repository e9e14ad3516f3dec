"""Agent loops: what happens in a session. A loop is `async def loop(session)`; each built-in one has a file.
Imports sessions and tools and below; runtime and above may import it.
"""

from __future__ import annotations

import inspect

from practicum.errors import RecipeError
from practicum.recipe.user_functions import import_function, meant
from practicum.sessions.loops.compress import compress
from practicum.sessions.loops.retry import retry
from practicum.sessions.loops.single_turn import single_turn
from practicum.sessions.loops.tool_use import tool_use
from practicum.sessions.session_result import Loop

LOOPS: dict[str, Loop] = {
    "single_turn": single_turn,
    "tool_use": tool_use,
    "retry": retry,
    "compress": compress,
}


def find_loop(name: str) -> Loop:
    """A built-in loop, or a user's `package.module:function`."""
    if name in LOOPS:
        return LOOPS[name]
    if ":" not in name:
        wanted = f"one of {', '.join(LOOPS)}, or package.module:function"
        raise RecipeError("agent.loop", repr(name), wanted, meant(name, LOOPS))
    function = import_function(name, "agent.loop")
    if not inspect.iscoroutinefunction(function):
        raise RecipeError("agent.loop", repr(name), "a coroutine function", "declare it `async def`")
    return function
