"""A GRPO step with and without sharing of what sequences have in common beyond their prompts.

Agents: 4 prompts × 4 sessions of 8 turns. *Rewritten*: each turn's prompt leaves out the first half of the
turn before it, as chat templates do with reasoning. *Forked*: after each turn, a fork takes a turn too.
SmolLM2-135M: single turns at temperature 1, on sums. Its learning rate is too small to change the samples.

`python -m benchmarks.sharing_step [CASE …]` races these of CASES, or all; results of others are kept.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import HERE, Channel, Contender
from benchmarks.model import CACHE, DIGITS, random_folder
from benchmarks.stepping import Steps, make_recipe
from practicum.engines.torch.prompt_cache import CachedSequence
from practicum.engines.torch.running_batch import RunningBatch
from practicum.learning.packing import RowSpans
from practicum.models.token_tree import TokenRows
from practicum.recipe.load_recipe import load_recipe
from practicum.recipe.schema.recipe import Recipe
from practicum.sessions.session import Session

PROMPTS, SAMPLES, TURNS, TURN_TOKENS = 4, 4, 8, 48
TOOL = "=48 tokens of a tool that found something by now"
ASIDE = "=48 tokens of a question to a helper of an agent"
CASES = {
    "1 thread, agents that rewrite": "rewriting",
    "1 thread, agents that fork": "forking",
    "1 thread, SmolLM2-135M": "smollm2",
}
FILES = {"file": "train.jsonl", "eval_file": "eval.jsonl"}
OURS, OFF = "practicum", "prompts only"
ROUNDS = 4


async def rewriting(session: Session) -> None:
    """Each turn has its own trajectory, whose prompt has the second half of each earlier turn."""
    tool = session.tokenizer.encode(TOOL, add_special_tokens=False)
    history = list(session.trajectory.prompt_ids)
    for turn in range(TURNS):
        if turn:
            session.new_trajectory(history)
        said = await session.generate(max_new_tokens=TURN_TOKENS, stop=())
        history += [*said.tokens[TURN_TOKENS // 2 :], *tool]


async def forking(session: Session) -> None:
    """Each turn is followed by a fork with one turn, which is over before the next turn."""
    for turn in range(TURNS):
        await session.generate(TOOL if turn else None, max_new_tokens=TURN_TOKENS, stop=())
        await session.fork().generate(ASIDE, max_new_tokens=TURN_TOKENS, stop=())


def by_letters(sample: Any) -> float:
    """Differs between almost any two answers."""
    return sum(map(ord, sample.response_text)) % 7 / 6


class PromptRows(TokenRows):
    """Rows of a batch that share whole prompts only."""

    def shared(self, i: int, j: int) -> int:
        most = self._fixed[i]
        return most if self._kinds[i] == self._kinds[j] and super().shared(i, j) >= most else 0


def share_prompts_only() -> None:
    """Compute each distinct prompt once, and nothing else that sequences have in common, except that a turn
    continues the one before it."""
    regroup, lay_out = RunningBatch.regroup, RowSpans.__init__

    def split(self: RunningBatch, gone: Sequence[int]) -> list[tuple[int, int, int]]:
        self.last_B.copy_(self._out_B)  # no two rows have the same
        copies = regroup(self, gone)
        self.last_B.copy_(self._tokens[self._out_B, self.made_B - 1])
        return copies

    def spans(self: RowSpans, *args: Any, **options: Any) -> None:
        lay_out(self, *args, **options)
        inputs = [torch.cat(pair)[:-1].numpy() for pair in zip(self.prompts, self.responses, strict=True)]
        kinds = [prompt.numpy().tobytes() for prompt in self.prompts]
        self.tokens = PromptRows(inputs, kinds, self.prompt_lengths)

    RunningBatch.regroup, RowSpans.__init__ = split, spans
    CachedSequence.beginning_of = lambda self, prompt: None


def practicum(channel: Channel, case: str, shares: bool) -> None:
    """The step of `practicum train`, all run-time checks on."""
    if not shares:
        share_prompts_only()
    with Steps(recipe_of(case)) as steps:
        channel.serve(lambda turn: steps.step())


def recipe_of(case: str) -> Recipe:
    if case == "smollm2":
        path, made = HERE.parent / "recipes" / "smollm2", prepared()
        files = [f"tasks.sums.{key}={made / name}" for key, name in FILES.items()]
        changes = [
            f"model.path={made / 'model'}",
            *files,
            "eval.rows=1",
            "runtime.threads=1",
            "train.lr=1e-12",
        ]
        return load_recipe(path / "grpo.yaml", changes).recipe
    return make_recipe(
        f"sharing_{case}",
        prompts=PROMPTS,
        samples=SAMPLES,
        max_new_tokens=TURN_TOKENS,
        digits=DIGITS,
        lr=1e-5,
        threads=1,
        model={"path": str(random_folder(256, 4))},
        reward={"functions": [{"use": f"{__name__}:by_letters"}]},
        agent={"loop": f"{__name__}:{case}"},
    )


def prepared() -> Path:
    """The folder of SmolLM2-135M-Instruct and its questions; made on first use, then kept."""
    script, folder = HERE.parent / "recipes" / "smollm2" / "prepare.py", CACHE / "smollm2"
    if not folder.exists():
        command = [sys.executable, script, "--out", folder, "--cache", CACHE / "smollm2-download"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def main(titles: Sequence[str]) -> None:
    """Race these cases, and add to the results."""
    raced = harness.stored("sharing_step")
    for title in titles:
        print(f"step with and without sharing, {title}")
        if CASES[title] == "smollm2":
            prepared()
        else:
            random_folder(256, 4)
        options = [(name, {"case": CASES[title], "shares": name == OURS}) for name in (OURS, OFF)]
        contenders = [
            Contender(name, "benchmarks.sharing_step:practicum", chosen) for name, chosen in options
        ]
        raced[title] = harness.race(contenders, ROUNDS)
        harness.require_same_work(raced[title])
        settings = {"prompts": PROMPTS, "samples": SAMPLES, "turns": TURNS, "turn_tokens": TURN_TOKENS}
        harness.write_results("sharing_step", {"settings": settings | {"rounds": ROUNDS}, "raced": raced})


if __name__ == "__main__":
    main(sys.argv[1:] or [*CASES])
