"""The recipe's tools, created once and shared by all sessions."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from practicum.errors import RecipeError
from practicum.recipe.own_parts import find_function
from practicum.recipe.schema.rollout_sections import McpSection
from practicum.recipe.schema.rollout_sections import ToolSection as ToolSpec
from practicum.sessions.tools.calculator import CALCULATOR
from practicum.sessions.tools.mcp_tools import mcp_tools
from practicum.sessions.tools.python_tool import INSTALL, python_tool, sandbox_problem
from practicum.sessions.tools.tool import Tool, ToolError, function_tool
from practicum.user_code import encodable, shorten, trace

TOOLS: dict[str, Callable[[ToolSpec], Tool]] = {
    "calculator": lambda spec: CALCULATOR,
    "python": lambda spec: python_tool(spec.timeout_s),
}


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The text of a call's result for the model. `ok` is False if it describes an error."""

    text: str
    ok: bool
    trace: str | None = field(default=None, compare=False)
    """Traceback of a custom tool that raised anything other than ToolError."""


class Toolbox:
    """Runs tool calls of many sessions concurrently. `calls`, `errors` and `seconds` are cumulative."""

    def __init__(self, specs: Sequence[ToolSpec | McpSection]) -> None:
        self._by_name: dict[str, Tool] = {}
        for n, spec in enumerate(specs):
            path = f"agent.tools[{n}].{'mcp' if isinstance(spec, McpSection) else 'use'}"
            if isinstance(spec, McpSection):
                made = mcp_tools(spec, path)
            elif spec.use in TOOLS:
                made = [TOOLS[spec.use](spec)]
            else:
                made = [function_tool(find_function("tool", spec.use, TOOLS, path), path, spec.timeout_s)]
            for tool in made:
                if tool.name in self._by_name:
                    raise RecipeError(path, f"a second tool named {tool.name}", "tools with different names")
                self._by_name[tool.name] = tool
        self.tools = tuple(self._by_name.values())
        self.calls = self.errors = 0
        self.seconds = 0.0

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools]

    async def run(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Return the tool's result, or a message about an unknown tool, bad arguments or a failure."""
        began = time.monotonic()
        try:
            if name not in self._by_name:
                names = ", ".join(self._by_name) or "none"
                raise ToolError(f"no tool is named {shorten(repr(name), 60)}: the tools are {names}.")
            outcome = ToolOutcome(encodable(await self._by_name[name].call(arguments)), True)
        except ToolError as error:
            cause = error.__cause__
            outcome = ToolOutcome(encodable(str(error)), False, None if cause is None else trace(cause))
        self.calls += 1
        self.errors += not outcome.ok
        self.seconds += time.monotonic() - began
        return outcome

    def close(self) -> None:
        """Stop running calls, from any thread."""
        for tool in self.tools:
            tool.close()


def require_sandbox(specs: Sequence[ToolSpec | McpSection]) -> None:
    """Raise a RecipeError if the Python tool is used and bubblewrap does not run on this machine."""
    for n, spec in enumerate(specs):
        if isinstance(spec, ToolSpec) and spec.use == "python" and (problem := sandbox_problem()):
            fix = f"install it: {INSTALL}"
            if shutil.which("bwrap") is not None:
                fix = "allow user namespaces in the container or kernel"
            expected = "bubblewrap, in which its programs run"
            raise RecipeError(f"agent.tools[{n}].use", f"python, but {problem}", expected, fix)
