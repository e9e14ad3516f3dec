"""A tool: a name, parameters with a JSON schema, and a coroutine that returns text.

`function_tool` creates one from a user's function, whose signature and docstring become the schema.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from practicum.concurrency.user_calls import call_each, is_async
from practicum.errors import PracticumError, RecipeError
from practicum.user_code import error_line, shorten

Kind = Literal["string", "integer", "number", "boolean", "array", "object", "any"]
_KINDS: dict[Any, Kind] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_WORDS: dict[Kind, str] = {
    "string": "text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
}
OUTPUT_CHARS = 2000
"""Maximum characters of a result for the model."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ToolError(PracticumError):
    """A failed tool call. The message is for the model."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a tool, with JSON schema types."""

    name: str
    kind: Kind = "string"
    about: str = ""
    required: bool = True

    def fit(self, value: Any) -> Any:
        """Convert the value to the parameter's type. Text is parsed as JSON: plain calls have only text."""
        if self.kind == "any":
            return value
        fitted = value
        if isinstance(value, str) and self.kind != "string":
            with suppress(ValueError, RecursionError):
                fitted = json.loads(value.lower() if self.kind == "boolean" else value)
        is_number = isinstance(fitted, int | float) and not isinstance(fitted, bool)
        if is_number and self.kind == "string":
            return str(fitted)
        if self.kind == "integer" and isinstance(fitted, float) and fitted.is_integer():
            return int(fitted)
        if is_number and self.kind == "number" and (isinstance(fitted, int) or math.isfinite(fitted)):
            return fitted
        if _KINDS.get(type(fitted)) != self.kind or self.kind == "number":
            found = shorten(repr(value), 60)
            raise ToolError(f"parameter {self.name} must be {_WORDS[self.kind]}, found {found}.")
        return fitted


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `run` takes validated arguments and may raise ToolError. `close` stops running calls."""

    name: str
    about: str
    parameters: tuple[Parameter, ...]
    run: Callable[[dict[str, Any]], Awaitable[str]]
    close: Callable[[], None] = lambda: None
    input_schema: Mapping[str, Any] | None = None
    """The JSON schema of its arguments, if that says more than the parameters do."""

    @property
    def schema(self) -> dict[str, Any]:
        """Return the tool's schema for the `tools` argument of chat templates."""
        properties = {
            p.name: {"type": p.kind, **({"description": p.about} if p.about else {})} for p in self.parameters
        }
        required = [p.name for p in self.parameters if p.required]
        parameters = self.input_schema or {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.about, "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def main(self) -> Parameter | None:
        """Return the parameter for a plain call's text: the first required one, or the first."""
        return next((p for p in self.parameters if p.required), next(iter(self.parameters), None))

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Run a call. Raise ToolError for a missing or wrong argument. Null means no optional argument."""
        known = {p.name: p for p in self.parameters}
        takes = f"{self.name} takes {', '.join(known) or 'no parameters'}"
        for name in arguments:
            if name not in known:
                raise ToolError(f"unknown parameter {shorten(repr(name), 60)}: {takes}.")
        for parameter in self.parameters:
            if parameter.required and parameter.name not in arguments:
                raise ToolError(f"missing parameter {parameter.name}: {takes}.")
        given = {k: v for k, v in arguments.items() if v is not None or known[k].required}
        return await self.run({name: known[name].fit(value) for name, value in given.items()})


def cut(text: str, limit: int) -> str:
    """Return the text, or its first `limit` characters with a note that it was longer."""
    return text if len(text) <= limit else f"{text[:limit]}… (cut after {limit} characters)"


def function_tool(function: Callable[..., Any], path: str, timeout_s: float) -> Tool:
    """Return a tool named like the function, sync (each call in a thread) or async.

    Raise RecipeError at `path` if its signature has no schema. The model reads the message of a ToolError
    that the function raises, and the type and message of any other exception.
    """
    name = getattr(function, "__name__", type(function).__name__)
    text = inspect.getdoc(function) or ""
    about = " ".join(text.partition("\n\n")[0].split())
    section = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
    notes = dict(re.findall(r"^\s+(\w+)(?: \([^)]*\))?: *(.+)$", section, re.MULTILINE))

    async def call_async(arguments: dict[str, Any]) -> Any:
        return await function(**arguments)

    async def run(arguments: dict[str, Any]) -> str:
        caller = asyncio.current_task()
        who = f"tool {name}, called by {'' if caller is None else caller.get_name()}"
        call = call_async if is_async(function) else lambda arguments: function(**arguments)
        (outcome,) = await call_each(call, [arguments], timeout_s, stop_early=False, named=lambda _: who)
        if outcome.failure is None:
            return cut(str(outcome.value), OUTPUT_CHARS)
        if isinstance(outcome.error, ToolError):
            raise outcome.error
        raise ToolError(f"{name} {outcome.failure}") from outcome.error

    return Tool(name, about or name, _parameters(function, notes, path), run)


def _parameters(function: Callable[..., Any], notes: dict[str, str], path: str) -> tuple[Parameter, ...]:
    try:
        signature = inspect.signature(function)
        hints = get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
    except Exception as error:  # annotations may be any code
        found = f"a function whose signature can't be read ({error_line(error)})"
        raise RecipeError(path, found, "a function with a signature") from None
    parameters = []
    for p in signature.parameters.values():
        if p.kind not in _NAMED:
            advice = "models pass arguments by name: declare each parameter."
            raise RecipeError(path, f"parameter {p}", "named parameters", advice)
        kind = _kind(hints.get(p.name, str))
        if kind is None:
            types = "str, int, float, bool, list or dict"
            raise RecipeError(path, f"parameter {p}", types, "models pass JSON values.")
        parameters.append(Parameter(p.name, kind, notes.get(p.name, ""), p.default is p.empty))
    return tuple(parameters)


def _kind(annotation: Any) -> Kind | None:
    """Return the JSON schema type of a Python type. `list[int]` is an array and `int | None` an integer."""
    if get_origin(annotation) in (Union, UnionType):
        forms = [form for form in get_args(annotation) if form is not NoneType]
        return _kind(forms[0]) if len(forms) == 1 else None
    return _KINDS.get(get_origin(annotation) or annotation)
