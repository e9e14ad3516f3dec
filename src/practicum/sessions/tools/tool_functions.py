"""A user's function as a tool: its signature and docstring become the schema."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from practicum.errors import RecipeError
from practicum.sessions.tools.tool import Kind, Parameter, Tool, ToolError, cut
from practicum.tasks.user_calls import call_each, is_async
from practicum.user_code import error_line, speakable, text_of, type_name

_KINDS: dict[Any, Kind] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def function_tool(function: Callable[..., Any], path: str, timeout_s: float, output_chars: int) -> Tool:
    """A tool named like the function, sync (each call in a thread) or async.

    A RecipeError at `path` if its signature can't be shown to a model. The function may raise ToolError to
    tell the model a sentence; any other error is told by its type and message.
    """
    name = getattr(function, "__name__", type(function).__name__)
    about, notes = _read_docstring(speakable(inspect.getdoc(function) or ""))
    parameters = _parameters(function, notes, path)
    call = _by_mapping(function)

    async def run(arguments: dict[str, Any]) -> str:
        caller = asyncio.current_task()
        who = f"tool {name}, called by {'' if caller is None else caller.get_name()}"
        (outcome,) = await call_each(call, [arguments], timeout_s, stop_early=False, named=lambda _: who)
        if outcome.failure is None:
            try:
                return cut(speakable(str(outcome.value)), output_chars)
            except BaseException as error:  # whatever the user's value does when it is read
                found = f"{name} returned a {type_name(outcome.value)} whose text can't be read"
                raise ToolError(f"{found} ({error_line(error)})") from error
        if outcome.error is not None and issubclass(type(outcome.error), ToolError):
            raise ToolError(text_of(outcome.error)) from None
        raise ToolError(f"{name} {outcome.failure}") from outcome.error

    return Tool(name, about or name, parameters, run)


def _by_mapping(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """The function with one parameter, the mapping of its arguments; async if it is."""

    async def call_async(arguments: dict[str, Any]) -> Any:
        return await function(**arguments)

    def call(arguments: dict[str, Any]) -> Any:
        return function(**arguments)

    return call_async if is_async(function) else call


def _parameters(function: Callable[..., Any], notes: dict[str, str], path: str) -> tuple[Parameter, ...]:
    try:
        signature = inspect.signature(function)
        target = function if inspect.isroutine(function) else type(function).__call__
        hints = get_type_hints(target)
    except Exception as error:  # annotations may be any code
        found = f"a function whose signature can't be read ({error_line(error)})"
        raise RecipeError(path, found, "one that can") from None
    found = []
    for p in signature.parameters.values():
        if p.kind not in _NAMED:
            advice = "a model gives arguments by name: write out the parameters."
            raise RecipeError(path, f"parameter {p}", "parameters that have names", advice)
        kind = _kind(hints.get(p.name, str))
        if kind is None:
            types = "str, int, float, bool, list or dict"
            raise RecipeError(path, f"parameter {p}", types, "a model can only give what JSON has.")
        found.append(Parameter(p.name, kind, notes.get(p.name, ""), p.default is p.empty))
    return tuple(found)


def _kind(annotation: Any) -> Kind | None:
    """The JSON schema's word for a Python type; `list[int]` is a list and `int | None` an int."""
    if get_origin(annotation) in (Union, UnionType):
        forms = [form for form in get_args(annotation) if form is not NoneType]
        return _kind(forms[0]) if len(forms) == 1 else None
    return _KINDS.get(get_origin(annotation) or annotation)


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph, and the lines `name: what it is` of the section Args."""
    about = " ".join(text.partition("\n\n")[0].split())
    _, _, section = text.partition("\nArgs:\n")
    notes = re.findall(r"^\s+(\w+)(?: \([^)]*\))?: *(.+)$", section.partition("\n\n")[0], re.MULTILINE)
    return about, dict(notes)
