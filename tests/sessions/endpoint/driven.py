"""Agents for tests: a policy whose turns can be told apart, and plain HTTP clients of each dialect."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import httpx2
import torch

from practicum.engines.protocol import Counter, Generation, Sampling
from practicum.sessions.endpoint.agent_session import AgentSession
from practicum.sessions.endpoint.endpoint import AgentEndpoint, running_endpoint
from practicum.sessions.session import Session, Trajectory
from practicum.tasks.messages import Message
from tests.sessions.sessions import byte_tokenizer, one_by_one, session_of

TOKENIZER = byte_tokenizer("chatml")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call>'
TOOL = {
    "name": "calculator",
    "description": "Calculates.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}


@dataclass
class Sampled:
    """A turn as it was sampled."""

    before: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Writer:
    """Writes turns that depend on the counter alone: texts in odd tokenisations, random bytes, tool calls.
    Every turn is kept, with logprobs that no other turn has."""

    texts: Sequence[str] = ("ab a", f"so {CALL}", "<think>hm</think> ab", " b STOP c", f"{CALL}{CALL}", "")
    wait_s: float = 0.0
    sampled: list[Sampled] = field(default_factory=list)

    async def next(
        self, trajectory: Trajectory, sampling: Sampling, counter: Counter, session: Session
    ) -> Generation:
        name = repr((counter, session.prompt.uid)).encode()
        draw = random.Random(blake2b(name, digest_size=8).digest())
        text = draw.choice(self.texts)
        ids = (
            one_by_one(TOKENIZER, text)
            if text
            else [draw.randrange(250) for _ in range(draw.randrange(1, 9))]
        )
        tokens = torch.tensor([*ids, END][: sampling.max_new_tokens])
        logprobs = torch.tensor([-draw.random() for _ in tokens])
        before = trajectory.ids()
        await asyncio.sleep(self.wait_s)
        self.sampled.append(Sampled(before, tokens.tolist(), logprobs.tolist()))
        finish = "stop" if int(tokens[-1]) == END else "length"
        return Generation(tokens, logprobs, logprobs - 1, finish, 3, 4)


def chat_session(policy: Any, **more: Any) -> Session:
    return session_of("1+2?", policy, TOKENIZER, chat=True, **{"agent": {"turns": 64}, **more})


@dataclass
class Running:
    """A session behind the endpoint, and a client of it."""

    endpoint: AgentEndpoint
    key: str
    agent: AgentSession
    http: httpx2.AsyncClient

    async def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        return await self.http.post(f"/v1/{path}", json=body, headers=headers)

    async def chat(self, messages: Sequence[Message], headers: Any = None, **body: Any) -> dict[str, Any]:
        """Return the one choice of a chat completion."""
        response = await self.post("chat/completions", {"messages": messages, **body}, **(headers or {}))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]


def with_agent(session: Session, use: Callable[[Running], Awaitable[Any]]) -> list[Trajectory]:
    """Serve a session for a client; return its trajectories."""

    async def run() -> list[Trajectory]:
        endpoint = running_endpoint()
        async with endpoint.open(session) as (key, agent):
            headers = {"authorization": f"Bearer {key}"}
            async with httpx2.AsyncClient(base_url=endpoint.url, headers=headers, timeout=30) as http:
                await use(Running(endpoint, key, agent, http))
            return await agent.end()

    return asyncio.run(run())


def rows(trajectories: Sequence[Trajectory]) -> list[dict[str, list[Any]]]:
    """Return the columns of trajectories as lists, to be compared bit for bit."""
    return [{name: column.tolist() for name, column in t.columns().items()} for t in trajectories]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
