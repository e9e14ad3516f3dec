"""The recipe's tools: made once, shown to the model, and run for every session."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from practicum.errors import RecipeError
from practicum.recipe.own_parts import find_function
from practicum.recipe.schema.rollout_sections import ToolSection as ToolSpec
from practicum.sessions.tools.bubblewrap import INSTALL, find_bubblewrap
from practicum.sessions.tools.calculator import CALCULATOR
from practicum.sessions.tools.python_tool import isolation_problem, python_tool
from practicum.sessions.tools.tool import Tool, ToolError
from practicum.sessions.tools.tool_functions import function_tool
from practicum.user_code import shorten, speakable, text_of, trace

TOOLS: dict[str, Callable[[ToolSpec], Tool]] = {
    "calculator": lambda spec: CALCULATOR,
    "python": lambda spec: python_tool(spec.timeout_s, spec.memory_mb, spec.output_chars, spec.isolation),
}


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What a call gave: text for the model, and whether it is an answer or says what went wrong."""

    text: str
    ok: bool
    trace: str | None = field(default=None, compare=False)
    """The traceback of a user's tool that raised anything but a ToolError."""


class Toolbox:
    """Runs tool calls of many sessions at once; a mistake in the specs is a RecipeError.

    `calls`, `errors` and `seconds` (summed over calls, waiting for a free core included) only grow.
    """

    def __init__(self, specs: Sequence[ToolSpec]) -> None:
        self.tools = tuple(_make(spec, f"agent.tools[{n}].use") for n, spec in enumerate(specs))
        self._by_name: dict[str, Tool] = {}
        for n, tool in enumerate(self.tools):
            if tool.name in self._by_name:
                path = f"agent.tools[{n}].use"
                raise RecipeError(path, f"a second tool named {tool.name}", "tools with different names")
            self._by_name[tool.name] = tool
        self.calls = self.errors = 0
        self.seconds = 0.0

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them in `tools=`."""
        return [tool.schema for tool in self.tools]

    async def run(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """The tool's answer, or a sentence on what went wrong: no such tool, bad arguments, its failure."""
        began = time.monotonic()
        try:
            ran = ToolOutcome(speakable(await self._find(name).call(arguments)), True)
        except ToolError as error:
            cause = error.__cause__
            ran = ToolOutcome(speakable(text_of(error)), False, None if cause is None else trace(cause))
        self.calls += 1
        self.errors += not ran.ok
        self.seconds += time.monotonic() - began
        return ran

    def close(self) -> None:
        """End what still runs; from any thread."""
        for tool in self.tools:
            tool.close()

    def _find(self, name: str) -> Tool:
        if name in self._by_name:
            return self._by_name[name]
        names = ", ".join(self._by_name) or "none"
        raise ToolError(f"no tool is named {shorten(repr(name), 60)}: the tools are {names}.")


def require_isolation(specs: Sequence[ToolSpec]) -> None:
    """Programs of the Python tool can be isolated on this machine as they are to be, or a RecipeError."""
    for n, spec in enumerate(specs):
        if spec.use == "python" and (problem := isolation_problem(spec.isolation)):
            installed = find_bubblewrap() is not None
            fix = (
                "allow user namespaces in the container or kernel" if installed else f"install it: {INSTALL}"
            )
            raise RecipeError(
                f"agent.tools[{n}].isolation",
                f"{spec.isolation}, which does not run here: {problem}",
                "bubblewrap that runs programs of the tool python",
                f"{fix}. Without it, set {{use: python, isolation: process}}: the program then runs with "
                "your rights, behind a guard that it may get round",
            )


def isolation_warnings(specs: Sequence[ToolSpec]) -> list[str]:
    """What a user accepts with isolation `process`."""
    if not any(spec.use == "python" and spec.isolation == "process" for spec in specs):
        return []
    return [
        "the tool python has isolation: process. Its programs run with your rights: time, memory, output and "
        "processes are limited, but a program that gets round the guard can read and write your files, the "
        "run folder too. For a model that you do not trust, use bubblewrap or a container"
    ]


def _make(spec: ToolSpec, path: str) -> Tool:
    if spec.use in TOOLS:
        return TOOLS[spec.use](spec)
    function = find_function("tool", spec.use, TOOLS, path)
    return function_tool(function, path, spec.timeout_s, spec.output_chars)
