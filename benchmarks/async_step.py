"""Steps whose rollouts are ahead of the learner (`rollout.lag`) beside the same steps one after the other.

Kinds of work: GRPO on sorting, the demo's student and one of its specialists, agents whose tools take 50 to
500 ms, and answers whose lengths have a long tail. A turn is a block of steps. Before it, as many steps are
taken without the clock as can have been sampled before, so for each step in the block another one is sampled
in it; and it ends for others when nothing is under way. Synchronous steps take part with one and with two
threads; with a lag, engines and learner have one each. For GRPO they also have two each, and one each in
threads of one process. Beside the speed: the greedy score by step and by second of the demo's GRPO of
reversing.

`python -m benchmarks.async_step [KIND …]` races those kinds, or all, and `scores` trains; results of others
are kept.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Channel, Contender, Measured, Stopwatch
from benchmarks.model import DIGITS, demo_folder
from benchmarks.stepping import Steps, demo_recipe, make_recipe
from practicum.engines.torch.make_torch import TorchKind
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.shipped import shipped_recipes
from practicum.sessions.session import Session
from practicum.trainer.run import train_loaded
from practicum.trainer.window import Window

SAMPLES, MAX_NEW, LR = 8, 32, 1e-5
PROMPTS = {"grpo": 32, "agents": 16, "long tail": 16}
ROUNDS, SCORES = 3, "scores"
BLOCKS = {"grpo": 4, "demo student": 20, "demo specialist": 20, "agents": 4, "long tail": 4}
"""Steps of a turn."""
WAYS = {"sync, 1 thread": (0, 1), "sync, 2 threads": (0, 2), "lag 1": (1, 1), "lag 2": (2, 1)}
"""Lag and threads of each contender."""
IN_THREADS = "lag 1, engine in a thread"
OTHER_WAYS = {"grpo": {"lag 1, 2 threads each": (1, 2), IN_THREADS: (1, 1)}}
"""Further contenders, by kind of work."""
TOOL_MS, TOOL_TURNS, TURN_TOKENS = (50, 500), (2, 3), (4, 24)
TAIL_MEDIAN, TAIL_SIGMA, TAIL_MOST = 12.0, 0.9, 160
SCORED = {"train.steps": 80, "eval.every": 10, "eval.rows": 256, "eval.stop_at": "null"}
"""Changes to the demo's recipe by which scores are compared."""


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


DEMO = {"demo student": "student", "demo specialist": "copy"}
"""Recipes of the demo, by the kind of work that they are."""
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    **{name: {} for name in DEMO},
    "agents": {"agent": {"loop": f"{__name__}:errand", "tools": [f"{__name__}:look_up"]}},
    "long tail": {"agent": {"loop": f"{__name__}:long_tail"}},
}


def recipe_of(kind: str, lag: int, threads: int) -> Recipe:
    """The recipe of a kind of work, ready to run."""
    if kind in DEMO:
        changes = ["track.record=none", f"runtime.threads={threads}", f"rollout.lag={lag}"]
        return demo_recipe(DEMO[kind], *changes)
    longest = {"grpo": MAX_NEW, "agents": TURN_TOKENS[1], "long tail": TAIL_MOST}[kind]
    return make_recipe(
        f"async-{kind.replace(' ', '-')}-{lag}-{threads}",
        prompts=PROMPTS[kind],
        samples=SAMPLES,
        max_new_tokens=longest,
        digits=DIGITS,
        lr=LR,
        threads=threads,
        rollout={"samples": SAMPLES, "max_new_tokens": longest, "context": 256, "lag": lag},
        track={"record": "none"},
        **KINDS[kind],
    )


def stepper(
    channel: Channel, kind: str, lag: int, threads: int, block: int, in_threads: bool = False
) -> None:
    """Blocks of steps; a turn ends when nothing is under way. `in_threads`: engines share this process."""
    if in_threads:
        TorchKind.hosts_lag = False
    with Steps(recipe_of(kind, lag, threads)) as steps:
        runner, done = steps.run.runner, 0
        engine = getattr(getattr(steps.run.roles, "engine", None), "host", None)

        def step() -> dict[str, Any]:
            nonlocal done
            done += 1
            return runner.step(done)

        def run(turn: int) -> Measured:
            for _ in range(lag + 1):
                step()
            watch, elsewhere = Stopwatch(), 0.0 if engine is None else cpu_seconds(engine.pid)
            measured = [step() for _ in range(block)]
            spent = watch.read()
            if engine is not None:
                spent["cpu_seconds"] += cpu_seconds(engine.pid) - elsewhere
            if isinstance(runner.sampling, Window):
                for thread in runner.sampling.threads():
                    thread.join()
            spent["tokens"] = sum(metrics["rollout/tokens"] for metrics in measured)
            spent["waited"] = sum(metrics.get("time/waited", 0.0) for metrics in measured)
            return {name: value / len(measured) for name, value in spent.items()}

        channel.serve(run)


def cpu_seconds(pid: int) -> float:
    """Processor time of another process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def learn(lag: int, threads: int) -> list[dict[str, float]]:
    """The demo's GRPO of reversing: greedy scores by step, each with the seconds until then."""
    rows: list[dict[str, float]] = []
    began, evaluated = time.perf_counter(), 0.0

    def note(row: dict[str, Any]) -> None:
        nonlocal evaluated
        evaluated += row.get("time/eval", 0.0)
        if "eval/greedy" in row:
            seconds = time.perf_counter() - began - evaluated
            rows.append({"step": row["step"], "score": row["eval/greedy"], "seconds": seconds})

    with tempfile.TemporaryDirectory() as folder:
        changes = [f"model.path={demo_folder()}", f"runtime.threads={threads}", f"rollout.lag={lag}"]
        changes += [f"{key}={value}" for key, value in SCORED.items()]
        loaded = load_recipe(shipped_recipes() / "mopd" / "reverse.yaml", [*changes, "track.record=none"])
        train_loaded(loaded, Path(folder) / "run", on_step=note, quiet=True)
    return rows


def main(names: Sequence[str]) -> None:
    """Race these kinds of work, or train each way, and add to the results."""
    raced, scores = harness.stored("async_step"), harness.stored("async_step", SCORES)
    for kind in names or [*KINDS, SCORES]:
        if kind == SCORES:
            scores = scored([name for name in WAYS if name != "sync, 1 thread"])
        else:
            raced[kind] = race(kind)
        settings = {"prompts": PROMPTS, "samples": SAMPLES, "blocks": BLOCKS, "rounds": ROUNDS}
        content = {"settings": settings, "raced": raced, "scores": scores}
        harness.write_results("async_step", content)


def race(kind: str) -> dict[str, list[Measured]]:
    """All ways of one kind of work in turn."""
    print(f"{kind}, blocks of {BLOCKS[kind]} steps, {os.cpu_count()} cores")
    options = {"kind": kind, "block": BLOCKS[kind]}
    contenders = [
        Contender(
            name,
            "benchmarks.async_step:stepper",
            options | {"lag": lag, "threads": threads, "in_threads": name == IN_THREADS},
            threads,
        )
        for name, (lag, threads) in (WAYS | OTHER_WAYS.get(kind, {})).items()
    ]
    return harness.race(contenders, ROUNDS, warmup=0)


def scored(names: Sequence[str]) -> dict[str, list[dict[str, float]]]:
    """Scores of each way of training, each in its turn."""
    found = {}
    for name in names:
        found[name] = learn(*WAYS[name])
        print(f"  {name}: {found[name][-1]}", flush=True)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
