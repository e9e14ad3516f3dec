"""Parse and write tool calls in the model's text.

`json`: <tool_call>{"name": …, "arguments": {…}}</tool_call>, as Hermes and Qwen templates ask for. `plain`:
[name: text], or [text] with a single tool, where the text is the tool's main parameter. For models too small
to write JSON. Brackets inside the text must be balanced. In both styles, the last call may be unclosed,
because a model may stop at the closing token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from practicum.sessions.tools.tool import Tool, ToolError
from practicum.user_code import shorten

Style = Literal["json", "plain"]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(r"</?tool_call>")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of the model."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    span: tuple[int, int] = field(default=(0, 0), compare=False)
    """Its position in the text."""


@dataclass(frozen=True, slots=True)
class BadCall:
    """A malformed call. The reason is a message for the model."""

    reason: str


def read_calls(text: str, style: Style, tools: Sequence[Tool]) -> list[Call | BadCall]:
    """Return the calls in a model's text in order, including malformed ones."""
    return _read_json(text) if style == "json" else _read_plain(text, tools)


def write_call(call: Call, style: Style, tools: Sequence[Tool]) -> str:
    """Write a call in its shortest form that can be parsed. Raise ToolError if none can."""
    text = next(iter(call.arguments.values()), None)
    if style == "json":
        written = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        forms = [f"{_OPEN}\n{written}\n{_CLOSE}"]
    else:
        forms = [f"[{text}]", f"[{call.name}: {text}]"] if call.arguments else [f"[{call.name}]"]
    for form in forms:
        if read_calls(form, style, tools) == [call]:
            return form
    raise ToolError(f"a call of {call.name} with {call.arguments!r} can't be written in {style} style.")


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


# Not strict, because models write programs with line breaks inside JSON strings.
_JSON = json.JSONDecoder(strict=False, parse_constant=_no_number)


def _read_json(text: str) -> list[Call | BadCall]:
    calls: list[Call | BadCall] = []
    at = text.find(_OPEN)
    while at >= 0:
        begin = at + len(_OPEN)
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        try:
            # Use the decoder rather than the closing tag, because an argument may contain the tag.
            value, end = _JSON.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            calls.append(BadCall(f"the tool call is not JSON: {getattr(error, 'msg', None) or error}."))
            end = begin
        else:
            tag = _TAG.search(text, end)
            rest = text[end : tag.start() if tag else len(text)].strip()
            follows = f"{shorten(repr(rest), 60)} follows the JSON of the tool call."
            call = BadCall(follows) if rest else _to_call(value)
            end = tag.end() if tag and tag[0] == _CLOSE and not rest else end
            calls.append(replace(call, span=(at, end)) if isinstance(call, Call) else call)
        at = text.find(_OPEN, end)
    return calls


def _to_call(value: Any) -> Call | BadCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('a tool call must be {"name": "...", "arguments": {...}}.')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = _JSON.decode(arguments)
        except (ValueError, RecursionError):
            return BadCall("the arguments of the tool call are not JSON.")
    if not isinstance(arguments, dict):
        return BadCall("the arguments of the tool call must be a mapping of names to values.")
    return Call(value["name"], arguments)


def _read_plain(text: str, tools: Sequence[Tool]) -> list[Call | BadCall]:
    calls: list[Call | BadCall] = []
    spans: list[tuple[int, int]] = []
    depth = begin = 0
    for at, character in enumerate(text):
        if character == "[":
            begin = at + 1 if depth == 0 else begin
            depth += 1
        elif character == "]" and depth:
            depth -= 1
            if depth == 0:
                calls.append(_plain_call(text[begin:at], tools))
                spans.append((begin - 1, at + 1))
    if depth:
        calls.append(_plain_call(text[begin:], tools))
        spans.append((begin - 1, len(text)))
    return [
        replace(call, span=span) if isinstance(call, Call) else call
        for call, span in zip(calls, spans, strict=True)
    ]


def _plain_call(inside: str, tools: Sequence[Tool]) -> Call | BadCall:
    name, colon, text = inside.partition(":")
    tool = next((t for t in tools if t.name == name.strip()), None)
    if tool is not None and not colon:
        return Call(tool.name)
    if tool is None:
        if len(tools) != 1:
            names = ", ".join(t.name for t in tools) or "none"
            found = shorten(repr(name.strip()), 60)
            return BadCall(f"no tool is named {found}: write [tool: text]; the tools are {names}.")
        tool, text = tools[0], inside
    text = text.strip()
    if tool.main is not None:
        return Call(tool.name, {tool.main.name: text})
    return BadCall(f"{tool.name} takes no text.") if text else Call(tool.name)
