"""Fuzzed conversations: whatever clients do, every sampled turn is trained once, with its own tokens."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from practicum.errors import PracticumError
from practicum.sessions.endpoint.agent_session import AgentSession, RequestMarks
from practicum.sessions.endpoint.dialects import DIALECTS
from practicum.sessions.session import Trajectory
from practicum.tasks.messages import Message
from tests.sessions.endpoint.driven import (
    TOOL,
    Running,
    Writer,
    chat_session,
    through_json,
    user,
    with_agent,
)

OPENINGS = ([user("1+2?")], [{"role": "system", "content": "ab"}, user("1+2?")], [user("sub ab a")])
TOOLS = ([], [{"type": "function", "function": TOOL}])


class Client:
    """Holds conversations of one session in the forms of all dialects, retries and forks at random."""

    def __init__(self, agent: AgentSession, draw: random.Random) -> None:
        self.agent, self.draw = agent, draw
        self.asked = 0
        """Turns that were asked for, without retries."""

    async def converse(self, turns: int) -> None:
        draw = self.draw
        messages: list[Message] = list(draw.choice(OPENINGS))
        tools = draw.choice(TOOLS)
        for number in range(turns):
            said = await self.ask(messages, tools, str(number))
            if said is None:  # it left and never came back
                return
            if draw.random() < 0.1 and len(messages) > 2:  # back to an earlier turn
                messages = messages[: 1 + len(messages) // 2]
                while messages[-1]["role"] == "assistant":
                    messages.pop()
                continue
            messages = [*messages, self.echoed(said)]
            calls = said.get("tool_calls") or []
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
            messages += results or [user("go on")]

    def echoed(self, said: Message) -> Message:
        """The reply as one of many clients sends it back."""
        draw, said = self.draw, json.loads(json.dumps(said))
        said.pop("reasoning_content", None)
        if draw.random() < 0.3:
            said["content"] = [{"type": "text", "text": said["content"] or ""}]
        for call in said.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, indent=draw.choice([None, 1]))
        return said

    async def ask(self, messages: list[Message], tools: list[Any], name: str) -> Message | None:
        draw = self.draw
        path = draw.choice(["chat/completions", "chat/completions", "messages", "responses"])
        body = _written(path, messages, tools)
        body |= {"stop": ["STOP"]} if path == "chat/completions" and draw.random() < 0.3 else {}
        n = 2 if path == "chat/completions" and draw.random() < 0.1 else 1
        body |= {"n": n} if n > 1 else {}
        key = None if draw.random() < 0.5 else f"{name}/{draw.random()}"
        digest = json.dumps([path, body]).encode()
        dialect = DIALECTS[path]
        request = dialect.read(json.loads(json.dumps(body)), self.agent.replies)
        self.asked += n
        exchange = self.agent.ask(request, RequestMarks(digest, key, None if key else 0, path))
        for retry in range(1, draw.choice([1, 1, 2, 3])):
            exchange.is_left = True
            await asyncio.sleep(0)
            same = self.agent.ask(request, RequestMarks(digest, key, None if key else retry, path))
            assert key is None or same is exchange
            exchange = same
        replies = await exchange.task
        assert len(replies) == n
        if draw.random() < 0.05 and not exchange.is_delivered:
            exchange.is_left = True
            return None
        exchange.is_delivered = True
        chosen = draw.choice(replies)
        return DIALECTS["chat/completions"].write(request, [chosen])["choices"][0]["message"]


def _written(path: str, messages: list[Message], tools: list[Any]) -> dict[str, Any]:
    """The request in a dialect."""
    if path == "chat/completions":
        return {"messages": messages, "tools": tools}
    functions = [tool["function"] for tool in tools]
    if path == "responses":
        items: list[Any] = []
        for message in messages:
            calls = message.get("tool_calls", [])
            if message["role"] == "tool":
                id_ = message["tool_call_id"]
                items.append({"type": "function_call_output", "call_id": id_, "output": message["content"]})
                continue
            if message.get("content") or not calls:
                items.append({"role": message["role"], "content": message.get("content") or ""})
            for c in calls:
                items.append({"type": "function_call", "call_id": c["id"], **c["function"]})
        return {"input": items, "tools": [{"type": "function", **function} for function in functions]}
    blocks: list[Any] = []
    system = "".join(m["content"] for m in messages if m["role"] == "system")
    for message in (m for m in messages if m["role"] != "system"):
        content: Any = message.get("content") or ""
        role = message["role"]
        if role == "tool":
            content = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
            role = "user"
        elif message.get("tool_calls"):
            text = content if isinstance(content, list) else [{"type": "text", "text": content}]
            uses = [
                {"type": "tool_use", "id": c["id"], "name": c["function"]["name"]}
                | {"input": json.loads(c["function"]["arguments"])}
                for c in message["tool_calls"]
            ]
            content = [*text, *uses]
        blocks.append({"role": role, "content": content})
    named = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
    return {"system": system, "messages": blocks, "tools": named, "max_tokens": 100}


def check(trajectories: list[Trajectory], writer: Writer, discarded: int) -> None:
    """Every trained span is a turn that was sampled after exactly these tokens, and none is there twice."""
    sampled = Counter((tuple(s.before), tuple(s.tokens), tuple(s.logprobs)) for s in writer.sampled)
    trained = Counter[Any]()
    for trajectory in trajectories:
        ids, at = trajectory.ids(), len(trajectory.prompt_ids)
        for piece in trajectory.pieces:
            end = at + len(piece.ids)
            if piece.sampled:
                found = tuple(ids[:at]), tuple(piece.logprobs.tolist())
                options = [key for key in sampled if (key[0], key[2][: end - at]) == found]
                assert len(options) == 1, "a row has what nobody sampled there"
                assert options[0][1][: end - at] == tuple(ids[at:end])
                trained[options[0]] += 1
            at = end
    assert max(trained.values(), default=1) == 1, "a turn is trained twice"
    assert len(writer.sampled) - trained.total() == discarded, "a turn is lost"


async def fuzz(seed: int, conversations: int) -> None:
    """Fuzz one session."""
    draw = random.Random(seed)
    writer = Writer(wait_s=0.0)
    agent = AgentSession(chat_session(writer, uid=seed, agent={"turns": 10_000}, context=100_000))
    clients = [Client(agent, random.Random(draw.random())) for _ in range(conversations)]
    await asyncio.gather(*(client.converse(draw.randrange(1, 6)) for client in clients))
    trajectories = await agent.end()
    try:
        check(trajectories, writer, agent.counts["discarded"])
        assert len(writer.sampled) == sum(client.asked for client in clients), "a retry was sampled"
        assert not any(t.breaks for t in trajectories), "a conversation was cut"
    except (AssertionError, PracticumError) as error:
        error.add_note(f"seed {seed}")
        raise


def run(sessions: int, conversations: int = 5) -> None:
    async def all_of_them() -> None:
        for first in range(0, sessions, 20):
            await asyncio.gather(*(fuzz(seed, conversations) for seed in range(first, first + 20)))

    asyncio.run(all_of_them())


def test_every_turn_of_300_fuzzed_conversations_is_trained_once():
    run(60)


@pytest.mark.long
def test_every_turn_of_ten_thousand_fuzzed_conversations_is_trained_once():
    run(2000)


ODD: list[Any] = [None, True, -1, 0.5, 10**30, "", "x", "\ud800", [], {}, [None], {"a": 1}]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each value in a JSON value, as its container and key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


def test_a_request_with_an_odd_value_gets_a_turn_or_a_refusal():
    draw, said = random.Random(1), {"role": "assistant", "content": "ab"}

    async def client(running: Running) -> None:
        for _ in range(250):
            path = draw.choice(["chat/completions", "messages", "messages/count_tokens", "responses"])
            body = through_json(_written(path.split("/count")[0], [*OPENINGS[1], said, user("b")], TOOLS[1]))
            container, key = draw.choice([*places(body)])
            container[key] = draw.choice(ODD)
            response = await running.http.post(f"/v1/{path}", content=json.dumps(body))
            assert response.status_code in (200, 400), json.dumps(body)
            assert not running.agent.trouble.done(), json.dumps(body)

    with_agent(chat_session(Writer(), agent={"turns": 1000}), client)
