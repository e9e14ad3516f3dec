"""A whole GRPO step of agents whose histories are rewritten or forked: rows begin alike, and differ later.

16 prompts × 4 sessions of 8 turns, 48 tokens each, with a random model of 4M parameters. *Rewritten*: each
turn's prompt leaves out the first half of the turn before it, as chat templates do with reasoning. *Forked*:
after 4 turns, a session forks into 4 with one turn each.

`python -m benchmarks.agent_step [CHECKOUT]` also races another checkout of practicum.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from benchmarks import harness
from benchmarks.harness import Channel, Contender
from benchmarks.model import DIGITS, random_folder
from benchmarks.stepping import Steps, mean
from practicum.recipe.schema.recipe import Recipe
from practicum.rewards.score_functions import RewardSample
from practicum.sessions.session import Session

PROMPTS, SAMPLES = 16, 4
TURNS, TURN_TOKENS = 8, 48
TOOL = "=24 tokens of a tool's;\n"
CASES = {"1 thread, rewritten": "rewriting", "1 thread, forked": "forking"}
ROUNDS = 5
LR = 1e-5


async def rewriting(session: Session) -> None:
    """Each turn has a trajectory of its own, whose prompt has the second half of each earlier turn."""
    tool = session.tokenizer.encode(TOOL, add_special_tokens=False)
    history = list(session.trajectory.prompt_ids)
    for turn in range(TURNS):
        if turn:
            session.new_trajectory(history)
        said = await session.generate(max_new_tokens=TURN_TOKENS, stop=())
        history += [*said.tokens[TURN_TOKENS // 2 :], *tool]


async def forking(session: Session) -> None:
    """The first half of the turns in one trajectory, then as many forks."""
    for turn in range(TURNS // 2):
        await session.generate(TOOL if turn else None, max_new_tokens=TURN_TOKENS, stop=())
    forks = [session.fork() for _ in range(TURNS // 2)]
    await asyncio.gather(*(fork.generate(TOOL, max_new_tokens=TURN_TOKENS, stop=()) for fork in forks))


def by_letters(sample: RewardSample) -> float:
    """Differs between almost any two answers."""
    return sum(map(ord, sample.response_text)) % 7 / 6


def practicum(channel: Channel, loop: str) -> None:
    """The step of `practicum train`, all run-time checks on."""
    written: dict[str, Any] = {
        "name": f"agent_step_{loop}",
        "model": {"path": str(random_folder(256, 4))},
        "tasks": {"sort": {"kind": "sort", "options": {"length": list(DIGITS)}}},
        "reward": {"functions": [{"use": f"{__name__}:by_letters"}]},
        "agent": {"loop": f"{__name__}:{loop}"},
        "rollout": {"samples": SAMPLES, "max_new_tokens": TURN_TOKENS},
        "train": {"prompts": PROMPTS, "lr": LR, "steps": 1000},
        "eval": {"rows": 1},
        "runtime": {"threads": 1},
    }
    with Steps(Recipe.model_validate(written)) as steps:
        channel.serve(lambda turn: mean([steps.step()]))


def main(other: str | None = None) -> None:
    """Race both kinds of agents, and write the results."""
    random_folder(256, 4)
    raced: dict[str, Any] = {}
    for title, loop in CASES.items():
        print(f"agent step, {title}")
        function, options = "benchmarks.agent_step:practicum", {"loop": loop}
        contenders = [Contender("practicum", function, options)]
        if other is not None:
            contenders.append(Contender("other checkout", function, options, source=f"{other}/src"))
        raced[title] = harness.race(contenders, ROUNDS)
    sizes = {"prompts": PROMPTS, "samples": SAMPLES, "turns": TURNS, "turn_tokens": TURN_TOKENS}
    harness.write_results("agent_step", {"settings": {**sizes, "rounds": ROUNDS}, "raced": raced})


if __name__ == "__main__":
    main(*sys.argv[1:])
