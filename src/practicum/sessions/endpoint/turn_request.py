"""A request for a turn and its reply, in a format shared by all dialects.

Messages are those of chat templates: role, text content, an assistant's `tool_calls`, a tool's `name`.
"""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from practicum.processes.http_server import Refusal
from practicum.sessions.chat import THOUGHT
from practicum.sessions.tools.tool import Parameter, Tool
from practicum.sessions.tools.tool_calls import BadCall, Style, read_calls
from practicum.tasks.messages import Message
from practicum.user_code import short_repr

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_ECHO = re.compile(r"\s*Calling tools:\n(\[\{.*\}\])\Z", re.DOTALL)
"""Format of smolagents' calls in a turn's text. Calls of python_interpreter are the text itself."""
MessageKey = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in a reply. `arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request for a turn. `prompt` is set for completions, which have no messages."""

    model: str
    messages: list[Message]
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    asked: dict[str, Any] = field(default_factory=dict)
    """Requested sampling settings."""


@dataclass(frozen=True, slots=True)
class TurnReply:
    """A turn in the client's format."""

    text: str
    finish: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    stop_text: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def message(self) -> Message:
        """Return the turn as a message of a later request."""
        calls = [chat_call(call.name, call.arguments) for call in self.calls]
        message: Message = {"role": "assistant", "content": self.text}
        return {**message, "tool_calls": calls} if calls else message


def chat_call(name: str, arguments: Any) -> dict[str, Any]:
    """Return a call in the format of chat templates. Arguments that are not a mapping stay text."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(content: Any) -> str:
    """Return the text of a message's content: None, text, or parts of text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(400, f"content is {short_repr(content, 60)}, expected text or parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS:
            texts.append(str(part.get("text") or part.get("refusal") or ""))
        else:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise Refusal(400, f"a content part is {short_repr(kind, 60)}: only text can be sent")
    return "".join(texts)


def message_key(message: Message) -> MessageKey:
    """Return a key that is equal for equal messages. It ignores reasoning, whitespace at the ends, call ids
    and the format of arguments, which clients change."""
    role, text = message["role"], text_of(message.get("content"))
    if role != "assistant":
        return role, text
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if not calls and (echo := _ECHO.search(text)):
        with suppress(ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
            listed = [call["function"] for call in ast.literal_eval(echo[1])]
            calls = [call for call in listed if call["name"] != "python_interpreter"]
            text = text[: echo.start()]
    named = [(call["name"], json.dumps(call["arguments"], sort_keys=True)) for call in calls]
    return role, THOUGHT.sub("", text, count=1).strip(), *named


def first_difference(ours: Sequence[MessageKey], theirs: Sequence[MessageKey]) -> tuple[int, str]:
    """Return the number of equal messages, and the first field that differs in the next."""
    pairs = zip(ours, theirs, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    if same >= min(len(ours), len(theirs)):
        return same, "length"
    a, b = ours[same], theirs[same]
    if "system" in (a[0], b[0]):
        return same, "system"
    names = ("role", "content", "tool_calls")
    return same, next(names[min(i, 2)] for i in range(max(len(a), len(b))) if a[i : i + 1] != b[i : i + 1])


def make_reply(
    text: str,
    finish: str,
    request: TurnRequest,
    style: Style,
    *,
    prompt_tokens: int,
    completion_tokens: int,
) -> TurnReply:
    """Return a turn as a reply: text up to a stop text, with reasoning and calls separated. Malformed calls,
    and calls of tools that are not in the request, stay text."""
    found = sorted((text.find(stop), stop) for stop in request.stop if stop in text)
    stop_text = found[0][1] if found else None
    text = text[: found[0][0]] if found else text
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "stop_text": stop_text}
    ended: Literal["stop", "length"] = "stop" if finish == "stop" else "length"
    if request.prompt is not None:
        return TurnReply(text, ended, **usage)
    thought = THOUGHT.match(text)
    reasoning, text = (thought[1].strip(), text[thought.end() :]) if thought else ("", text)
    calls, rest, at = [], [], 0
    tools = [_as_tool(schema) for schema in request.tools]
    names = {tool.name for tool in tools}
    calls_allowed = tools and request.asked.get("tool_choice") != "none"
    for call in read_calls(text, style, tools) if calls_allowed else ():
        if not isinstance(call, BadCall) and call.name in names:
            calls.append(ToolCall(call.name, json.dumps(call.arguments, ensure_ascii=False)))
            rest.append(text[at : call.span[0]])
            at = call.span[1]
    text = "".join([*rest, text[at:]])
    if calls:
        return TurnReply(text.strip(), "tool_calls", **usage, reasoning=reasoning, calls=calls)
    return TurnReply(text, ended, **usage, reasoning=reasoning)


def _as_tool(schema: Mapping[str, Any]) -> Tool:
    function = schema["function"]
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or ()

    async def run(arguments: dict[str, Any]) -> str:
        raise NotImplementedError("the client runs its tools")

    named = [Parameter(name, required=name in required) for name in parameters.get("properties") or ()]
    return Tool(function["name"], "", tuple(named), run)
