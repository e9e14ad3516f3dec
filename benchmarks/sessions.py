"""Sessions per second: 256 agents at once over one engine, whose tool takes 50 ms.

Each session has 2 or 3 tool turns and a last one. What the model writes does not matter: the loop calls the
tool after every turn, and says how long a turn is. So every contender computes the same tokens. Beside the
sessions as they are run in training, a tool that takes no time shows what the engine could do at most, and
waves show what a batched loop does, where all wait for all tools of a turn. Over HTTP, no tool is called, and
turns are requests to the endpoint from another process, as with `agent.loop: {function, python}`.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from benchmarks import harness
from benchmarks.harness import Channel, Contender, Measured, Stopwatch
from benchmarks.model import examples, random_folder
from practicum.concurrency.event_loop import run_async
from practicum.concurrency.gather import gather_all
from practicum.engines.protocol import Sampling
from practicum.engines.torch.scheduler import Scheduler
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.models.load_model import load_model, load_tokenizer
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.rollout_sections import Agent, FunctionLoop
from practicum.sessions.attempts import Loop, run_attempt
from practicum.sessions.endpoint.endpoint import running_endpoint
from practicum.sessions.endpoint.programs import AgentTask, run_function
from practicum.sessions.session import EnginePolicy, Session, SessionStart
from practicum.sessions.tools.toolbox import Toolbox
from practicum.tasks.messages import user
from practicum.tasks.prompts import Prompt

PROMPTS, SAMPLES = 32, 8
WIDTH, LAYERS, CONTEXT = 128, 4, 256
DIGITS = (6, 18)
TURN_TOKENS = (4, 32)
"""Fewest and most tokens of a turn."""
TOOL_TURNS = (2, 3)
TOOL_MS = 50
ROUNDS = 5
DEADLINE_S = 120.0
OURS, INSTANT, WAVES = "tools of 50 ms", "tools of 0 ms", "50 ms, in waves"
CLIENT = httpx2.AsyncClient(timeout=DEADLINE_S, limits=httpx2.Limits(max_connections=None))
"""Of all sessions in the client's process."""
IDLE = 1000
OVER_HTTP, BESIDE = "0 ms, over HTTP", f"0 ms, over HTTP, {IDLE:,} idle sessions"


async def look_up(ms: int) -> str:
    """A tool that waits for somebody else, as a search does."""
    if ms:
        await asyncio.sleep(ms / 1000)
    return "found"


def turns_of(prompt: int, session: int) -> list[int]:
    """How many tokens each turn of a session has; the tool is called after all but the last."""
    draw = random.Random(f"{prompt} {session}")
    return [draw.randint(*TURN_TOKENS) for _ in range(draw.randint(*TOOL_TURNS) + 1)]


async def errand(session: Session, ms: int, meet: Callable[[], Any] | None = None) -> None:
    """The agent's loop. With `meet`, all sessions wait for one another after each round of tools."""
    turns, said = session.prompt.row["turns"], None
    for number in range(TOOL_TURNS[1]):
        if number < len(turns) - 1:
            await session.generate(said, max_new_tokens=turns[number], stop=())
            said = [user((await session.tool("look_up", {"ms": ms})).text)]
        if meet is not None:
            await meet()
    await session.generate(said, max_new_tokens=turns[-1], stop=())


async def errand_over_http(task: AgentTask) -> dict[str, Any]:
    """The same loop as a client. Return each turn's seconds, and this process's processor time."""
    messages, parts = list(task.messages), {"from": time.process_time()}
    headers, url = {"authorization": f"Bearer {task.api_key}"}, f"{task.base_url}/chat/completions"
    for number, most in enumerate(task.row["turns"]):
        began, body = time.perf_counter(), {"messages": messages, "max_tokens": most}
        reply = (await CLIENT.post(url, json=body, headers=headers)).raise_for_status().json()
        parts[f"turn {number}"] = time.perf_counter() - began
        messages += [reply["choices"][0]["message"], user("found")]
    return {"reward": 0.0, "parts": {**parts, "to": time.process_time()}}


class Span(NamedTuple):
    """When a step of the engine began and ended."""

    began: float
    ended: float


def busy_share(steps: Sequence[Span], whole: Span) -> float:
    """Share of the time in which a step ran."""
    return sum(step.ended - step.began for step in steps) / (whole.ended - whole.began)


def longest_pause(steps: Sequence[Span], whole: Span) -> float:
    """Most seconds between two steps, or before the first and after the last."""
    ends = [whole.began, *(step.ended for step in steps)]
    begins = [*(step.began for step in steps), whole.ended]
    return max(begin - end for end, begin in zip(ends, begins, strict=True))


def watch_steps() -> list[Span]:
    """From now on, a span for each step of every engine that is made."""
    spans: list[Span] = []
    step = Scheduler.step

    def timed(self: Scheduler, arrived: Any) -> Any:
        began = time.perf_counter()
        try:
            return step(self, arrived)
        finally:
            spans.append(Span(began, time.perf_counter()))

    Scheduler.step = timed
    return spans


class Crowd:
    """Sessions of some prompts, all at once over one engine."""

    def __init__(self, prompts: int, samples: int) -> None:
        spec = Model(path=str(random_folder(WIDTH, LAYERS)))
        self.tokenizer = load_tokenizer(spec)
        self.prompts, self.samples = prompts, samples
        self.engine = TorchEngine(load_model(spec, 0), slots=prompts * samples, context=CONTEXT)
        agent = {"loop": f"{__name__}:errand", "tools": [f"{__name__}:look_up"]}
        self.agent = Agent.model_validate(agent)
        self.toolbox = Toolbox(self.agent.tools)

    def run(self, loop: Loop, seed: int) -> list[Session]:
        """All sessions by this loop, as a rollout runs them; returns them when the last one is done."""
        asked = examples(5, seed * self.prompts, self.prompts, DIGITS)
        starts = [SessionStart(self.tokenizer.encode(one.prompt)) for one in asked]
        prompts = [Prompt(i, "sort", "sort", e.prompt, e.answer, {}, 0, 0) for i, e in enumerate(asked)]
        sessions: list[Session] = []

        def make(prompt: int, index: int, attempt: int) -> Session:
            policy = EnginePolicy(self.engine, keep=True)
            sampling = Sampling(TURN_TOKENS[1], frozenset())
            asked = replace(prompts[prompt], row={"turns": turns_of(prompt, index)})
            given = (asked, starts[prompt], index, policy, sampling, self.tokenizer)
            more = {"agent": self.agent, "toolbox": self.toolbox, "seed": seed, "attempt": attempt}
            sessions.append(Session(*given, context=CONTEXT, **more))
            return sessions[-1]

        work = gather_all(
            run_attempt(loop, self.agent, partial(make, prompt, index), DEADLINE_S)
            for prompt in range(self.prompts)
            for index in range(self.samples)
        )
        ended = run_async(work, timeout=DEADLINE_S, owner="sessions")
        failures = [one.failure for one in ended if one.failure is not None]
        if failures:
            raise RuntimeError(f"{len(failures)} sessions failed, the first: {failures[0]}")
        return sessions


def resident_kib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4.0


def over_http_loop(group: Crowd, idle: int, stack: AsyncExitStack) -> tuple[Loop, float]:
    """Return the loop over HTTP, and the KiB of each of the idle sessions that are open from now on."""
    session = group.run(lambda session: errand(session, 0), 0)[0]

    async def open_idle() -> None:
        for number in range(idle):
            await stack.enter_async_context(running_endpoint().open(session.branch(number)))

    before = resident_kib()
    run_async(open_idle(), timeout=DEADLINE_S, owner="idle sessions")
    function = f"{Path(__file__).parents[1]}/{__name__}:errand_over_http"
    loop = partial(run_function, FunctionLoop(function=function, python=sys.executable))
    return loop, (resident_kib() - before) / max(1, idle)


def crowd(channel: Channel, prompts: int, samples: int, ms: int, waves: bool, idle: int | None) -> None:
    """All sessions at once in every turn; over HTTP if a number of idle sessions is given."""
    spans = watch_steps()
    group, stack = Crowd(prompts, samples), AsyncExitStack()
    meet = asyncio.Barrier(prompts * samples).wait if waves else None
    loop, idle_kib = partial(errand, ms=ms, meet=meet), 0.0
    if idle is not None:
        loop, idle_kib = over_http_loop(group, idle, stack)

    def run(turn: int) -> Measured:
        spans.clear()
        before = group.engine.stats.prefilled_tokens
        watch, began = Stopwatch(), time.perf_counter()
        sessions = group.run(loop, turn)
        whole, spent = Span(began, time.perf_counter()), watch.read()
        tokens = sum(session.trajectory.sampled_tokens for session in sessions)
        parts = [s.trajectory.reward_parts or {"from": 0, "to": 0} for s in sessions]
        waits = statistics.quantiles([v for p in parts for k, v in p.items() if "turn" in k] or [0, 0], n=100)
        return spent | {
            "tokens": tokens,
            "read_tokens": group.engine.stats.prefilled_tokens - before,
            "steps": len(spans),
            "sessions_per_second": len(sessions) / spent["seconds"],
            "tokens_per_second": tokens / spent["seconds"],
            "busy": busy_share(spans, whole),
            "longest_pause": longest_pause(spans, whole),
            "client_seconds": max(p["to"] for p in parts) - min(p["from"] for p in parts),
            "p50": waits[49],
            "p99": waits[98],
            "idle_kib": idle_kib,
        }

    channel.serve(run)
    group.engine.close()


def main(rounds: int = ROUNDS, prompts: int = PROMPTS, samples: int = SAMPLES) -> None:
    """Race them, and write the results."""
    random_folder(WIDTH, LAYERS)
    print(f"{prompts * samples} sessions at once, 1 thread")
    size = {"prompts": prompts, "samples": samples}
    kinds = [(OURS, TOOL_MS, False, None), (INSTANT, 0, False, None), (WAVES, TOOL_MS, True, None)]
    kinds += [(OVER_HTTP, 0, False, 0), (BESIDE, 0, False, IDLE)]
    contenders = [
        Contender(name, "benchmarks.sessions:crowd", {**size, "ms": ms, "waves": waves, "idle": idle})
        for name, ms, waves, idle in kinds
    ]
    raced = harness.race(contenders, rounds)
    harness.require_same_work(raced)
    settings = {**size, "width": WIDTH, "layers": LAYERS, "turn_tokens": TURN_TOKENS, "rounds": rounds}
    settings |= {"tool_turns": TOOL_TURNS, "tool_ms": TOOL_MS}
    harness.write_results("sessions", {"settings": settings, "raced": {"1 thread": raced}})


if __name__ == "__main__":
    main()
