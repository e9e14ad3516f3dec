"""Four API dialects with a shared request and reply: chat completions, completions, responses, messages.

A dialect reads a request's JSON, writes replies as JSON or as a stream's events, and writes errors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from practicum.processes.http_server import Refusal
from practicum.sessions.endpoint.turn_request import ROLES, TurnReply, TurnRequest, chat_call, text_of
from practicum.tasks.messages import Message
from practicum.user_code import short_repr

Data = dict[str, Any]
Event = tuple[str | None, Data | str]
"""Name (if the dialect has names) and data of a stream's event."""
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "response_format",
)


class Dialect(Protocol):
    """Parses requests and formats replies of one API."""

    ping: bytes
    """Keep-alive of a stream while the turn is sampled."""

    def read(self, data: Data, replies: Mapping[str, list[Message]]) -> TurnRequest:
        """Parse a request, or raise Refusal. `replies` maps ids of replies to conversations."""
        ...

    def write(self, request: TurnRequest, replies: Sequence[TurnReply]) -> Data: ...

    def events(self, request: TurnRequest, replies: Sequence[TurnReply]) -> Iterator[Event]: ...

    def error(self, status: int, message: str, code: str | None) -> Data: ...


class Completions:
    """OpenAI's /v1/completions."""

    ping = b": keep-alive\n\n"

    def read(self, data: Data, replies: Mapping[str, list[Message]]) -> TurnRequest:
        prompt = data.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
            prompt = prompt[0]
        is_ids = isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt)
        if not is_ids and not isinstance(prompt, str):
            raise Refusal(400, "prompt must be one text or one list of token ids")
        for name in ("echo", "suffix", "best_of"):
            if data.get(name) not in (None, False, 1, ""):
                raise Refusal(400, f"{name} is not supported")
        return TurnRequest(messages=[], prompt=prompt, **_openai(data, _whole(data, "max_tokens")))

    def write(self, request: TurnRequest, replies: Sequence[TurnReply]) -> Data:
        choices = [
            {"index": i, "text": reply.text, "logprobs": None, "finish_reason": reply.finish}
            for i, reply in enumerate(replies)
        ]
        return {
            **_envelope("cmpl", "text_completion", request, replies[0]),
            "choices": choices,
            **_usage(replies),
        }

    def events(self, request: TurnRequest, replies: Sequence[TurnReply]) -> Iterator[Event]:
        whole = self.write(request, replies)
        usage = whole.pop("usage")
        yield None, whole
        if request.include_usage:
            yield None, {**whole, "choices": [], "usage": usage}
        yield None, "[DONE]"

    def error(self, status: int, message: str, code: str | None) -> Data:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class ChatCompletions(Completions):
    """OpenAI's /v1/chat/completions."""

    def read(self, data: Data, replies: Mapping[str, list[Message]]) -> TurnRequest:
        names: dict[str, str] = {}
        messages = [_chat_message(message, names) for message in _items(data, "messages")]
        most = _whole(data, "max_completion_tokens") or _whole(data, "max_tokens")
        options = data.get("chat_template_kwargs") or {}
        shared = _openai(data, most)
        functions = _function_tools(data, shared["asked"], "function")
        tools = [_tool(tool.get("function"), "parameters") for tool in functions]
        if data.get("tool_choice") not in (None, "auto"):
            shared["asked"]["tool_choice"] = data["tool_choice"]
        return TurnRequest(messages=messages, tools=tools, options=dict(options), **shared)

    def write(self, request: TurnRequest, replies: Sequence[TurnReply]) -> Data:
        choices = [
            {"index": i, "message": _chat_reply(reply), "logprobs": None, "finish_reason": reply.finish}
            for i, reply in enumerate(replies)
        ]
        return {
            **_envelope("chatcmpl", "chat.completion", request, replies[0]),
            "choices": choices,
            **_usage(replies),
        }

    def events(self, request: TurnRequest, replies: Sequence[TurnReply]) -> Iterator[Event]:
        shared = _envelope("chatcmpl", "chat.completion.chunk", request, replies[0])

        def chunk(i: int, delta: Data, finish: str | None = None) -> Event:
            choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": finish}
            return None, {**shared, "choices": [choice]}

        for i, reply in enumerate(replies):
            yield chunk(i, {"role": "assistant", "content": ""})
            if reply.reasoning:
                yield chunk(i, {"reasoning_content": reply.reasoning})
            if reply.text:
                yield chunk(i, {"content": reply.text})
            for number, call in enumerate(_chat_reply(reply).get("tool_calls", [])):
                yield chunk(i, {"tool_calls": [{"index": number, **call}]})
            yield chunk(i, {}, reply.finish)
        if request.include_usage:
            yield None, {**shared, "choices": [], **_usage(replies)}
        yield None, "[DONE]"


class Responses(Completions):
    """OpenAI's /v1/responses."""

    def read(self, data: Data, replies: Mapping[str, list[Message]]) -> TurnRequest:
        messages: list[Message] = []
        names: dict[str, str] = {}
        if (earlier := data.get("previous_response_id")) is not None:
            if earlier not in replies:
                raise Refusal(404, f"this session has no response {short_repr(earlier, 60)}")
            messages = [m for m in replies[earlier] if m["role"] != "system"]
        if data.get("instructions"):
            messages.insert(0, {"role": "system", "content": text_of(data["instructions"])})
        given = data.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else _items(data, "input")
        for item in items:
            _add_item(messages, item, names)
        shared = _openai(data, _whole(data, "max_output_tokens"))
        tools = [_tool(tool, "parameters") for tool in _function_tools(data, shared["asked"], "function")]
        text_format = (data.get("text") or {}).get("format") or {"type": "text"}
        shared["asked"] |= {"response_format": text_format} if text_format.get("type") != "text" else {}
        if data.get("tool_choice") not in (None, "auto"):
            shared["asked"]["tool_choice"] = data["tool_choice"]
        return TurnRequest(messages=messages, tools=tools, **shared)

    def write(self, request: TurnRequest, replies: Sequence[TurnReply]) -> Data:
        reply = replies[0]
        output: list[Data] = []
        if reply.reasoning:
            summary = [{"type": "summary_text", "text": reply.reasoning}]
            output.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": summary})
        if reply.text or not reply.calls:
            part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
            message = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": "completed"}
            output.append({**message, "content": [part]})
        for call in reply.calls:
            item = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "status": "completed"}
            output.append({**item, "name": call.name, "arguments": call.arguments})
        usage = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        }
        cut = reply.finish == "length"
        return {
            "id": f"resp_{reply.id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": None,
            "metadata": {},
            "model": request.model,
            "output": output,
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [{"type": "function", **tool["function"], "strict": False} for tool in request.tools],
            "top_p": None,
            "usage": usage,
        }

    def events(self, request: TurnRequest, replies: Sequence[TurnReply]) -> Iterator[Event]:
        whole = self.write(request, replies)
        begun = {**whole, "status": "in_progress", "output": [], "usage": None}
        events: list[tuple[str, Data]] = [("response.created", {"response": begun})]
        for index, item in enumerate(whole["output"]):
            at = {"output_index": index, "item_id": item["id"]}
            events.append(("response.output_item.added", {"output_index": index, "item": _empty(item)}))
            if item["type"] == "message":
                part = item["content"][0]
                at["content_index"] = 0
                events.append(("response.content_part.added", {**at, "part": {**part, "text": ""}}))
                delta = {**at, "delta": part["text"], "logprobs": []}
                events.append(("response.output_text.delta", delta))
                events.append(("response.output_text.done", {**at, "text": part["text"], "logprobs": []}))
                events.append(("response.content_part.done", {**at, "part": part}))
            elif item["type"] == "function_call":
                arguments = item["arguments"]
                events.append(("response.function_call_arguments.delta", {**at, "delta": arguments}))
                done = {**at, "name": item["name"], "arguments": arguments}
                events.append(("response.function_call_arguments.done", done))
            events.append(("response.output_item.done", {"output_index": index, "item": item}))
        events.append((f"response.{whole['status']}", {"response": whole}))
        for number, (name, data) in enumerate(events):
            yield name, {"type": name, "sequence_number": number, **data}


class Messages:
    """Anthropic's /v1/messages."""

    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def read(self, data: Data, replies: Mapping[str, list[Message]]) -> TurnRequest:
        messages: list[Message] = []
        names: dict[str, str] = {}
        if data.get("system"):
            messages.append({"role": "system", "content": text_of(data["system"])})
        for message in _items(data, "messages"):
            messages += _blocks(message, names)
        asked = {name: data[name] for name in _SAMPLING if data.get(name) is not None}
        tools = [_tool(tool, "input_schema") for tool in _function_tools(data, asked, "custom")]
        choice = (data.get("tool_choice") or {}).get("type")
        if choice not in (None, "auto"):
            asked["tool_choice"] = choice
        return TurnRequest(
            str(data.get("model") or ""),
            messages,
            tools=tools,
            stop=_stops(data.get("stop_sequences")),
            max_tokens=_whole(data, "max_tokens"),
            stream=data.get("stream") is True,
            asked=asked,
        )

    def write(self, request: TurnRequest, replies: Sequence[TurnReply]) -> Data:
        reply = replies[0]
        content: list[Data] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.text:
            content.append({"type": "text", "text": reply.text})
        for call in reply.calls:
            use = {"type": "tool_use", "id": call.id, "name": call.name}
            content.append({**use, "input": json.loads(call.arguments)})
        reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish]
        return {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": content,
            "stop_reason": "stop_sequence" if reply.stop_text and not reply.calls else reason,
            "stop_sequence": None if reply.calls else reply.stop_text,
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
        }

    def events(self, request: TurnRequest, replies: Sequence[TurnReply]) -> Iterator[Event]:
        whole = self.write(request, replies)
        begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
        begun["usage"] = {**whole["usage"], "output_tokens": 0}
        events: list[Data] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(whole["content"]):
            deltas: dict[str, Callable[[], Data]] = {
                "text": lambda b=block: {"type": "text_delta", "text": b["text"]},
                "thinking": lambda b=block: {"type": "thinking_delta", "thinking": b["thinking"]},
                "tool_use": lambda b=block: {
                    "type": "input_json_delta",
                    "partial_json": json.dumps(b["input"], ensure_ascii=False),
                },
            }
            start = {"type": "content_block_start", "index": index, "content_block": _empty(block)}
            delta = {"type": "content_block_delta", "index": index, "delta": deltas[block["type"]]()}
            events += [start, delta, {"type": "content_block_stop", "index": index}]
        end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        events.append({"type": "message_delta", "delta": end, "usage": whole["usage"]})
        for event in [*events, {"type": "message_stop"}]:
            yield event["type"], event

    def error(self, status: int, message: str, code: str | None) -> Data:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kinds |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


DIALECTS: dict[str, Dialect] = {
    "chat/completions": ChatCompletions(),
    "completions": Completions(),
    "responses": Responses(),
    "messages": Messages(),
}
"""Dialects by path after /v1/."""


def _openai(data: Data, max_tokens: int | None) -> Data:
    """Return the fields that requests of OpenAI's dialects share."""
    asked = {name: data[name] for name in _SAMPLING if data.get(name) is not None}
    return {
        "model": str(data.get("model") or ""),
        "stop": _stops(data.get("stop")),
        "max_tokens": max_tokens,
        "n": _whole(data, "n") or 1,
        "stream": data.get("stream") is True,
        "include_usage": (data.get("stream_options") or {}).get("include_usage") is True,
        "asked": asked,
    }


def _envelope(prefix: str, kind: str, request: TurnRequest, reply: TurnReply) -> Data:
    created = int(time.time())
    return {"id": f"{prefix}-{reply.id}", "object": kind, "created": created, "model": request.model}


def _usage(replies: Sequence[TurnReply]) -> Data:
    prompt, new = replies[0].prompt_tokens, sum(reply.completion_tokens for reply in replies)
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}}


def _chat_message(message: Data, names: dict[str, str]) -> Message:
    """Return a chat message. `names` maps call ids to names, and receives this message's."""
    role = ROLES.get(str(message.get("role")))
    if role is None:
        raise Refusal(400, f"a message's role is {short_repr(message.get('role'), 60)}")
    read: Message = {"role": role, "content": text_of(message.get("content"))}
    calls = message.get("tool_calls") if role == "assistant" else None
    if calls:
        try:
            read["tool_calls"] = [
                chat_call(str(c["function"]["name"]), c["function"].get("arguments")) for c in calls
            ]
            names.update((str(c.get("id")), str(c["function"]["name"])) for c in calls)
        except (KeyError, TypeError, AttributeError):
            raise Refusal(400, f"tool_calls can't be read: {short_repr(calls)}") from None
    if role == "tool":
        name = names.get(str(message.get("tool_call_id"))) or message.get("name")
        read |= {"name": str(name)} if name else {}
    return read


def _chat_reply(reply: TurnReply) -> Data:
    message: Data = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in reply.calls
        ]
    return message


def _add_item(messages: list[Message], item: Data, names: dict[str, str]) -> None:
    """Append an item of a Responses input. Calls of a turn are added to its message."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append(_chat_message(item, names))
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        names[str(item.get("call_id"))] = str(item.get("name"))
        call = chat_call(str(item.get("name")), item.get("arguments"))
        messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", ()), call]
    elif kind == "function_call_output":
        output = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        messages.append(_chat_message(output, names))
    elif kind != "reasoning":
        raise Refusal(400, f"an input item is {short_repr(kind, 60)}, which is not supported")


def _blocks(message: Data, names: dict[str, str]) -> Iterator[Message]:
    """Yield the messages in Anthropic's content blocks. Tool results come before other text."""
    content = message.get("content")
    if not isinstance(content, list):
        yield _chat_message(message, names)
        return
    texts, calls, results = [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            names[str(block.get("id"))] = str(block.get("name"))
            calls.append(chat_call(str(block.get("name")), block.get("input") or {}))
        elif kind == "tool_result":
            results.append({"tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    for result in results:
        yield _chat_message({"role": "tool", **result}, names)
    if texts or calls or not results:
        read = _chat_message({"role": message.get("role"), "content": texts}, names)
        yield {**read, "tool_calls": calls} if calls else read


def _function_tools(data: Data, asked: Data, kind: str) -> list[Data]:
    """Return the client's function tools. Hosted tools are added to `asked`."""
    tools = _items(data, "tools", [])
    if others := sorted({str(tool["type"]) for tool in tools if tool.get("type", kind) != kind}):
        asked["tools"] = others
    return [tool for tool in tools if tool.get("type", kind) == kind]


def _tool(function: Any, schema: str) -> Data:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(400, f"a tool is {short_repr(function)}, expected a function with a name")
    kept: Data = {"name": function["name"], "description": str(function.get("description") or "")}
    parameters = function.get(schema) or {"type": "object", "properties": {}}
    named, required = parameters.get("properties") or {}, parameters.get("required") or []
    if not (isinstance(named, dict) and isinstance(required, list)):
        raise Refusal(
            400, f"the {schema} of tool {kept['name']} are {short_repr(parameters)}, expected a schema"
        )
    return {"type": "function", "function": {**kept, "parameters": parameters}}


def _items(data: Data, name: str, default: list[Data] | None = None) -> list[Data]:
    value = data.get(name)
    value = default if value is None and default is not None else value
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refusal(400, f"{name} must be a list of objects")
    if not value and default is None:
        raise Refusal(400, f"{name} is empty")
    return value


def _whole(data: Data, name: str) -> int | None:
    value = data.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise Refusal(400, f"{name} is {short_repr(value, 60)}, expected a number from 1 on")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise Refusal(400, f"stop is {short_repr(value)}, expected texts")
    return tuple(stop for stop in stops if stop)


def _empty(item: Data) -> Data:
    """Return a stream's item in its initial state."""
    blanks: Data = {"text": "", "thinking": "", "arguments": "", "content": [], "summary": [], "input": {}}
    begun = {name: blanks.get(name, value) for name, value in item.items()}
    return {**begun, "status": "in_progress"} if "status" in item else begun
