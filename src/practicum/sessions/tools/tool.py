"""What a tool is: a name, parameters that a chat template can show, and a coroutine that answers in text."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from practicum.errors import PracticumError
from practicum.user_code import shorten

Kind = Literal["string", "integer", "number", "boolean", "array", "object"]

_WORDS: dict[Kind, str] = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
}


class ToolError(PracticumError):
    """A tool can't do what it was asked; the sentence is for the model that asked."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool, in the words of JSON schema."""

    name: str
    kind: Kind = "string"
    about: str = ""
    required: bool = True


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `run` gets arguments that fit the parameters; what it can't do is a ToolError.

    `close` ends what still runs; it may be called from any thread.
    """

    name: str
    about: str
    parameters: tuple[Parameter, ...]
    run: Callable[[dict[str, Any]], Awaitable[str]]
    close: Callable[[], None] = _nothing

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates take it in `tools=`."""
        properties = {
            p.name: {"type": p.kind, **({"description": p.about} if p.about else {})} for p in self.parameters
        }
        required = [p.name for p in self.parameters if p.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.about, "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def main(self) -> Parameter | None:
        """The parameter that takes a plain call's text: the first required one, or the first of all."""
        return next((p for p in self.parameters if p.required), next(iter(self.parameters), None))

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The answer to a model's arguments; a ToolError names a parameter that is missing or wrong."""
        return await self.run(self._fit(arguments))

    def _fit(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments in their parameters' types; null for an optional parameter is its default."""
        known = {p.name: p for p in self.parameters}
        takes = f"{self.name} takes {', '.join(known) or 'no parameters'}"
        for name in arguments:
            if name not in known:
                raise ToolError(f"unknown parameter {shorten(repr(name), 60)}: {takes}.")
        for parameter in self.parameters:
            if parameter.required and parameter.name not in arguments:
                raise ToolError(f"missing parameter {parameter.name}: {takes}.")
        return {
            name: _fitted(value, known[name])
            for name, value in arguments.items()
            if value is not None or known[name].required
        }


def _fitted(value: Any, parameter: Parameter) -> Any:
    fitted = _FIT[parameter.kind](value)
    if fitted is None:
        found = shorten(repr(value), 60)
        raise ToolError(f"parameter {parameter.name} must be {_WORDS[parameter.kind]}, found {found}.")
    return fitted


def _string(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _number(value: Any) -> float | int | None:
    """A finite number; text that says one counts, because plain calls have nothing but text."""
    if isinstance(value, str):
        for read in (int, float):
            try:
                return _number(read(value))
            except ValueError:
                continue
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _integer(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) else None


def _boolean(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False}.get(value.strip().lower()) if isinstance(value, str) else None


_FIT: dict[Kind, Callable[[Any], Any]] = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "array": lambda value: value if isinstance(value, list) else None,
    "object": lambda value: value if isinstance(value, dict) else None,
}


def cut(text: str, limit: int) -> str:
    """The text, or its first `limit` characters with a note that there was more."""
    return text if len(text) <= limit else f"{text[:limit]}… (cut after {limit} characters)"
