"""Sessions per second through the HTTP endpoint of agents, beside the same sessions without it.

256 sessions of three turns at once over one engine; every contender samples the same tokens. The requests
come from another process, as with `agent.loop: {function, python}`. The last has 1,000 idle sessions too.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
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
from practicum.sessions.attempts import Loop
from practicum.sessions.endpoint.endpoint import running_endpoint
from practicum.sessions.endpoint.programs import AgentTask, run_function
from practicum.sessions.session import Session
from practicum.tasks.messages import prompt_text, user

IDLE = 1000
CLIENT = httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None))
"""Shared by all sessions of a process: to make a client takes 50 ms of processor time."""


def turns_of(prompt: str) -> list[int]:
    """Return the tokens of each turn."""
    draw = random.Random(prompt)
    return [draw.randint(*TURN_TOKENS) for _ in range(3)]


async def talk(session: Session) -> None:
    new = None
    for tokens in turns_of(prompt_text(session.prompt.content)):
        await session.generate(new, max_new_tokens=tokens)
        new = [user("more")]


async def talk_over_http(task: AgentTask) -> dict[str, Any]:
    """Hold the conversation of `talk` and return the seconds of each turn."""
    messages, seconds = list(task.messages), {}
    headers = {"authorization": f"Bearer {task.api_key}"}
    url = f"{task.base_url}/chat/completions"
    for number, tokens in enumerate(turns_of(task.prompt)):
        began, body = time.perf_counter(), {"messages": messages, "max_tokens": tokens}
        response = (await CLIENT.post(url, json=body, headers=headers)).raise_for_status()
        seconds[str(number)] = time.perf_counter() - began
        messages += [response.json()["choices"][0]["message"], user("more")]
    return {"reward": 0.0, "parts": seconds}


async def open_idle(stack: AsyncExitStack, session: Session, count: int) -> None:
    for number in range(count):
        await stack.enter_async_context(running_endpoint().open(session.branch(number)))


def crowd(channel: Channel, over_http: bool, idle: int) -> None:
    group, idle_sessions = Crowd(PROMPTS, SAMPLES), AsyncExitStack()
    function = f"{Path(__file__).parents[1]}/benchmarks.agents:talk_over_http"
    loop: Loop = partial(run_function, FunctionLoop(function=function, python=sys.executable))
    if idle:
        run_async(open_idle(idle_sessions, group.run(talk, 0)[0], idle), timeout=60, owner="idle sessions")

    def run(turn: int) -> Measured:
        watch = Stopwatch()
        sessions = group.run(loop if over_http else talk, turn)
        spent = watch.read()
        tokens = sum(trajectory.sampled_tokens for s in sessions for trajectory in s.trajectories)
        waits = [s for one in sessions for s in (one.trajectories[-1].reward_parts or {}).values()] or [0, 0]
        cuts = statistics.quantiles(waits, n=100)
        rate = len(sessions) / spent["seconds"]
        return spent | {"tokens": tokens, "sessions_per_second": rate, "p50": cuts[49], "p99": cuts[98]}

    channel.serve(run)
    group.engine.close()


def main() -> None:
    """Race the three, and write the results."""
    random_folder(WIDTH, LAYERS)
    kinds = (("built-in loop", False, 0), ("endpoint", True, 0), (f"endpoint, {IDLE:,} idle", True, IDLE))
    raced = harness.race(
        [Contender(n, "benchmarks.agents:crowd", {"over_http": h, "idle": i}) for n, h, i in kinds], ROUNDS
    )
    if len({tuple(found["tokens"] for found in measured) for measured in raced.values()}) > 1:
        raise ValueError("not the same work")
    for name, measured in raced.items():
        print(name, {key: statistics.median(found[key] for found in measured) for key in measured[0]})
    harness.write_results(
        "agents", {"settings": {"sessions": PROMPTS * SAMPLES}, "raced": {"1 thread": raced}}
    )


if __name__ == "__main__":
    main()
