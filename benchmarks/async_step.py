"""Steps whose rollouts are ahead of the learner (`async.lag`) beside the same steps one after the other.

Three kinds of work: GRPO on sorting, agents whose tools take 50 to 500 ms, and answers whose lengths have a
long tail. Every turn is a block of steps that begins and ends with nothing under way, so filling the window
counts. Synchronous steps take part with one and with two threads; with a lag, engines and learner have one
each. Beside the speed: the greedy score by step and by second of GRPO runs from the same start.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Channel, Contender, Measured, Stopwatch
from benchmarks.model import DIGITS, model_folder
from benchmarks.stepping import Steps
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Recipe
from practicum.sessions.session import Session
from practicum.trainer.run import train_loaded

PROMPTS, SAMPLES, MAX_NEW, LR = 32, 8, 32, 1e-5
BLOCK, ROUNDS = 8, 4
WAYS = {"sync, 1 thread": (0, 1), "sync, 2 threads": (0, 2), "lag 1": (1, 1), "lag 2": (2, 1)}
"""Lag and threads of each contender."""
TOOL_MS, TOOL_TURNS, TURN_TOKENS = (50, 500), (2, 3), (4, 24)
TAIL_MEDIAN, TAIL_SIGMA, TAIL_MOST = 12.0, 0.9, 160
GOALS = {"grpo": {"lag 1": 1.5}, "agents": {"lag 1": 1.7, "lag 2": 2.1}}
SCORE_STEPS, SCORE_EVERY, SCORE_LR = 40, 4, 1e-4


async def look_up(ms: int) -> str:
    """A tool that waits for somebody else, as a search does."""
    await asyncio.sleep(ms / 1000)
    return "=found;"


async def errand(session: Session) -> None:
    """Some turns with a tool after each but the last, by numbers of the prompt and the session alone."""
    draw, said = random.Random(f"{session.prompt.uid} {session.index}"), None
    for _ in range(draw.randint(*TOOL_TURNS)):
        await session.generate(said, max_new_tokens=draw.randint(*TURN_TOKENS), stop=())
        said = (await session.tool("look_up", {"ms": draw.randint(*TOOL_MS)})).text
    await session.generate(said, max_new_tokens=draw.randint(*TURN_TOKENS), stop=())


async def long_tail(session: Session) -> None:
    """One answer of a length with a long tail."""
    draw = random.Random(f"{session.prompt.uid} {session.index}")
    length = min(TAIL_MOST, round(TAIL_MEDIAN * 2.718281828 ** (TAIL_SIGMA * draw.gauss(0.0, 1.0))) + 1)
    await session.generate(max_new_tokens=length, stop=())


KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "agents": {"agent": {"loop": f"{__name__}:errand", "tools": [f"{__name__}:look_up"]}},
    "long tail": {"agent": {"loop": f"{__name__}:long_tail"}},
}


def written(kind: str, lag: int, threads: int, prompts: int) -> dict[str, Any]:
    """The recipe of a kind of work."""
    longest = {"grpo": MAX_NEW, "agents": TURN_TOKENS[1], "long tail": TAIL_MOST}[kind]
    return {
        "name": f"async-{kind.replace(' ', '-')}-{lag}-{threads}",
        "model": {"path": str(model_folder())},
        "tasks": {"sort": {"kind": "sort", "options": {"length": list(DIGITS)}}},
        "rollout": {"samples": SAMPLES, "max_new_tokens": longest, "context": 256},
        "train": {"prompts": prompts, "lr": LR, "steps": 1000},
        "eval": {"rows": 1},
        "track": {"record": "none"},
        "runtime": {"threads": threads},
        "async": {"lag": lag},
        **KINDS[kind],
    }


def stepper(channel: Channel, kind: str, lag: int, threads: int, prompts: int, block: int) -> None:
    """Blocks of steps, at whose end nothing is under way."""
    with Steps(Recipe.model_validate(written(kind, lag, threads, prompts))) as steps:
        runner, done = steps.run.runner, 0

        def run(turn: int) -> Measured:
            nonlocal done
            if runner.window is not None:
                runner.window.schedule = replace(runner.schedule, steps=done + block)
            watch, tokens = Stopwatch(), 0.0
            waited = 0.0
            for _ in range(block):
                done += 1
                metrics = runner.step(done)
                tokens += metrics["rollout/tokens"]
                waited += metrics.get("time/waited", 0.0)
            spent = {name: seconds / block for name, seconds in watch.read().items()}
            return spent | {"tokens": tokens / block, "waited": waited / block}

        channel.serve(run)


def learn(lag: int, threads: int, steps: int) -> list[dict[str, float]]:
    """A GRPO run from the benchmark's model: greedy scores by step, each with the seconds until then."""
    train = {"prompts": PROMPTS, "steps": steps, "lr": SCORE_LR}
    more = {"train": train, "eval": {"rows": 64, "every": SCORE_EVERY}}
    rows: list[dict[str, float]] = []
    began, evaluated = time.perf_counter(), 0.0

    def note(row: dict[str, Any]) -> None:
        nonlocal evaluated
        evaluated += row.get("time/eval", 0.0)
        if "eval/greedy" in row:
            seconds = time.perf_counter() - began - evaluated
            rows.append({"step": row["step"], "score": row["eval/greedy"], "seconds": seconds})

    with tempfile.TemporaryDirectory() as folder:
        loaded = load_recipe(written("grpo", lag, threads, PROMPTS) | more)
        train_loaded(loaded, Path(folder) / "run", on_step=note, quiet=True)
    return rows


def main(rounds: int = ROUNDS, prompts: int = PROMPTS, block: int = BLOCK, steps: int = SCORE_STEPS) -> None:
    """Race each kind of work, train each way, and write the results."""
    model_folder()
    raced: dict[str, Any] = {}
    for kind in KINDS:
        print(f"{kind}, blocks of {block} steps, {os.cpu_count()} cores")
        contenders = [
            Contender(
                name,
                "benchmarks.async_step:stepper",
                {"kind": kind, "lag": lag, "threads": threads, "prompts": prompts, "block": block},
                threads,
            )
            for name, (lag, threads) in WAYS.items()
        ]
        raced[kind] = harness.race(contenders, rounds)
    scores = scored([name for name in WAYS if name != "sync, 1 thread"], steps)
    settings = {"prompts": prompts, "samples": SAMPLES, "block": block, "rounds": rounds, "steps": steps}
    content = {"settings": settings, "goals": GOALS, "raced": raced, "scores": scores}
    harness.write_results("async_step", content)


def scored(names: Sequence[str], steps: int) -> dict[str, list[dict[str, float]]]:
    """Scores of each way of training, each in its turn."""
    found = {}
    for name in names:
        lag, threads = WAYS[name]
        found[name] = learn(lag, threads, steps)
        print(f"  {name}: {found[name][-1]}", flush=True)
    return found


if __name__ == "__main__":
    main()
