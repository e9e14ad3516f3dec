"""Sessions per second through the HTTP endpoint of agents, beside the same sessions without it.

256 sessions of three turns at once over one engine; both contenders sample the same tokens. The requests come
from another process, as with `agent.loop: {function, python}`. The last has 1,000 idle sessions too.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import harness
from benchmarks.harness import Channel, Contender, Measured, Stopwatch
from benchmarks.model import random_folder
from benchmarks.sessions import LAYERS, PROMPTS, ROUNDS, SAMPLES, TURN_TOKENS, WIDTH, Crowd
from practicum.concurrency.event_loop import run_async
from practicum.recipe.schema.rollout_sections import FunctionLoop
from practicum.sessions.endpoint.endpoint import running_endpoint
from practicum.sessions.endpoint.programs import AgentTask, run_function
from practicum.sessions.session import Session
from practicum.tasks.messages import prompt_text, user

IDLE = 1000
SHORT, LONG = TURN_TOKENS, (48, 64)
TITLES = {f"turns of {least} to {most} tokens": (least, most) for least, most in (SHORT, LONG)}
BUILT_IN, ENDPOINT, BESIDE = "built-in loop", "endpoint", f"endpoint, {IDLE:,} idle sessions"
CLIENT = httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None))
"""Shared by all sessions of a process: making a client takes 50 ms of processor time."""


def turns_of(prompt: str, tokens: Sequence[int]) -> list[int]:
    """Return the tokens of each turn."""
    draw = random.Random(prompt)
    return [draw.randint(*tokens) for _ in range(3)]


async def talk(session: Session, tokens: Sequence[int]) -> None:
    new = None
    for most in turns_of(prompt_text(session.prompt.content), tokens):
        await session.generate(new, max_new_tokens=most)
        new = [user("more")]


async def talk_over_http(task: AgentTask, tokens: Sequence[int]) -> dict[str, Any]:
    """Hold the conversation of `talk` and return the seconds of each turn."""
    messages, seconds = list(task.messages), {}
    headers = {"authorization": f"Bearer {task.api_key}"}
    url = f"{task.base_url}/chat/completions"
    for number, most in enumerate(turns_of(task.prompt, tokens)):
        began, body = time.perf_counter(), {"messages": messages, "max_tokens": most}
        response = (await CLIENT.post(url, json=body, headers=headers)).raise_for_status()
        seconds[str(number)] = time.perf_counter() - began
        messages += [response.json()["choices"][0]["message"], user("more")]
    return {"reward": 0.0, "parts": seconds}


async def short_talk(task: AgentTask) -> dict[str, Any]:
    return await talk_over_http(task, SHORT)


async def long_talk(task: AgentTask) -> dict[str, Any]:
    return await talk_over_http(task, LONG)


async def open_idle(stack: AsyncExitStack, session: Session, count: int) -> None:
    for number in range(count):
        await stack.enter_async_context(running_endpoint().open(session.branch(number)))


def crowd(channel: Channel, tokens: Sequence[int], over_http: bool, idle: int) -> None:
    """Run all sessions at once in every round."""
    group, idle_sessions = Crowd(PROMPTS, SAMPLES), AsyncExitStack()
    name = "short_talk" if tuple(tokens) == SHORT else "long_talk"
    function = f"{Path(__file__).parents[1]}/benchmarks.agents:{name}"
    built_in = partial(talk, tokens=tokens)
    if idle:
        run_async(
            open_idle(idle_sessions, group.run(built_in, 0)[0], idle), timeout=60, owner="idle sessions"
        )

    def run(turn: int) -> Measured:
        watch = Stopwatch()
        spec = FunctionLoop(function=function, python=sys.executable)
        sessions = group.run(partial(run_function, spec) if over_http else built_in, turn)
        spent = watch.read()
        sampled = sum(trajectory.sampled_tokens for s in sessions for trajectory in s.trajectories)
        waits = [s for one in sessions for s in (one.trajectories[-1].reward_parts or {}).values()] or [0, 0]
        cuts = statistics.quantiles(waits, n=100)
        rate = len(sessions) / spent["seconds"]
        return spent | {"tokens": sampled, "sessions_per_second": rate, "p50": cuts[49], "p99": cuts[98]}

    channel.serve(run)
    group.engine.close()


def main() -> None:
    """Race them, and write the results."""
    random_folder(WIDTH, LAYERS)
    raced = {}
    for title, tokens in TITLES.items():
        kinds = [(BUILT_IN, False, 0), (ENDPOINT, True, 0), (BESIDE, True, IDLE)]
        options = ((name, {"tokens": tokens, "over_http": http, "idle": idle}) for name, http, idle in kinds)
        raced[title] = harness.race([Contender(n, "benchmarks.agents:crowd", o) for n, o in options], ROUNDS)
        if len({tuple(found["tokens"] for found in measured) for measured in raced[title].values()}) > 1:
            raise ValueError("not the same work")
    harness.write_results("agents", {"settings": {"sessions": PROMPTS * SAMPLES}, "raced": raced})


if __name__ == "__main__":
    main()
