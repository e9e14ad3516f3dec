"""Sessions per second: 256 agents at once over one engine, whose tool takes 50 ms.

Each session has 2 or 3 tool turns and a last one. What the model writes does not matter: the loop calls the
tool after every turn, and says how long a turn is. So every contender computes the same tokens. Beside the
sessions as they are run in training, a tool that takes no time shows what the engine could do at most, and
waves show what a batched loop does, where all wait for all tools of a turn.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from practicum.recipe.schema.rollout_sections import Agent
from practicum.sessions.attempts import Loop, run_attempt
from practicum.sessions.session import EnginePolicy, Session, SessionStart
from practicum.sessions.tools.toolbox import Toolbox
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


async def look_up(ms: int) -> str:
    """A tool that waits for somebody else, as a search does."""
    if ms:
        await asyncio.sleep(ms / 1000)
    return "=found;"


def turns_of(prompt: int, session: int) -> list[int]:
    """How many tokens each turn of a session has; the tool is called after all but the last."""
    draw = random.Random(f"{prompt} {session}")
    return [draw.randint(*TURN_TOKENS) for _ in range(draw.randint(*TOOL_TURNS) + 1)]


async def errand(session: Session, ms: int, meet: Callable[[], Any] | None = None) -> None:
    """The agent's loop. With `meet`, all sessions wait for one another after each round of tools."""
    turns, said = turns_of(session.prompt.uid, session.index), None
    for number in range(TOOL_TURNS[1]):
        if number < len(turns) - 1:
            await session.generate(said, max_new_tokens=turns[number], stop=())
            said = (await session.tool("look_up", {"ms": ms})).text
        if meet is not None:
            await meet()
    await session.generate(said, max_new_tokens=turns[-1], stop=())


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
            given = (prompts[prompt], starts[prompt], index, policy, sampling, self.tokenizer)
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


def crowd(channel: Channel, prompts: int, samples: int, ms: int, waves: bool) -> None:
    """All sessions at once in every turn."""
    spans = watch_steps()
    group = Crowd(prompts, samples)
    meet = asyncio.Barrier(prompts * samples).wait if waves else None

    def run(turn: int) -> Measured:
        spans.clear()
        before = group.engine.stats.prefilled_tokens
        watch, began = Stopwatch(), time.perf_counter()
        sessions = group.run(lambda session: errand(session, ms, meet), turn)
        whole, spent = Span(began, time.perf_counter()), watch.read()
        tokens = sum(session.trajectory.sampled_tokens for session in sessions)
        return spent | {
            "tokens": tokens,
            "read_tokens": group.engine.stats.prefilled_tokens - before,
            "steps": len(spans),
            "sessions_per_second": len(sessions) / spent["seconds"],
            "tokens_per_second": tokens / spent["seconds"],
            "busy": busy_share(spans, whole),
            "longest_pause": longest_pause(spans, whole),
        }

    channel.serve(run)
    group.engine.close()


def main(rounds: int = ROUNDS, prompts: int = PROMPTS, samples: int = SAMPLES) -> None:
    """Race the three, and write the results."""
    random_folder(WIDTH, LAYERS)
    print(f"{prompts * samples} sessions at once, 1 thread")
    size = {"prompts": prompts, "samples": samples}
    contenders = [
        Contender(name, "benchmarks.sessions:crowd", {**size, "ms": ms, "waves": waves})
        for name, ms, waves in ((OURS, TOOL_MS, False), (INSTANT, 0, False), (WAVES, TOOL_MS, True))
    ]
    raced = harness.race(contenders, rounds)
    counted = {name: [found["tokens"] for found in measured] for name, measured in raced.items()}
    if len({tuple(tokens) for tokens in counted.values()}) > 1:
        raise ValueError(f"not the same work: tokens sampled are {counted}")
    settings = {
        **size,
        "width": WIDTH,
        "layers": LAYERS,
        "turn_tokens": TURN_TOKENS,
        "tool_turns": TOOL_TURNS,
        "tool_ms": TOOL_MS,
        "rounds": rounds,
    }
    content = {"settings": settings, "raced": {"1 thread": raced}}
    harness.write_results("sessions", content)


if __name__ == "__main__":
    main()
