"""How much there is to do in a step: rows and tokens."""

from __future__ import annotations

from dataclasses import dataclass

from practicum.forecast.measured_run import MeasuredRun
from practicum.recipe.counts import count
from practicum.recipe.derived import is_supervised
from practicum.recipe.schema.recipe import Recipe

ANSWER_SHARE = 0.5
"""Mean length of an answer in parts of rollout.max_new_tokens, where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A step's prompts, its sessions (one row each), and mean tokens of a prompt and an answer.

    `longest` is the length at which the last answers end. `idle`: see `MeasuredRun`. `told` says where
    the lengths come from. `greedy` are sessions that are rolled out and judged, but not trained on.
    """

    prompts: int
    sessions: int
    greedy: int
    prompt_tokens: float
    response_tokens: float
    longest: float
    idle: float
    told: str

    @property
    def rows(self) -> int:
        return self.sessions + self.greedy

    @property
    def sampled(self) -> float:
        """Tokens that the engines sample."""
        return self.rows * self.response_tokens

    @property
    def learnt(self) -> float:
        """Tokens of one pass of the learner: a prompt is computed once for all of its answers."""
        return self.prompts * self.prompt_tokens + self.sessions * self.response_tokens

    @property
    def scored(self) -> float:
        """Tokens of rows, each with its prompt."""
        return self.sessions * (self.prompt_tokens + self.response_tokens)

    @property
    def seen(self) -> float:
        """Tokens that a token attends to, in the mean."""
        return self.prompt_tokens + self.response_tokens / 2


def workload(recipe: Recipe, prompt_tokens: float, run: MeasuredRun | None) -> Workload:
    """The work of a recipe's step; lengths of answers as in the run, else by `ANSWER_SHARE`."""
    counts, most = count(recipe), recipe.rollout.max_new_tokens
    if run is None or run.response_tokens is None:
        mean, longest, idle = ANSWER_SHARE * most, float(most), 0.0
        told = f"half of rollout.max_new_tokens = {most}, a guess: --from RUN knows better"
    else:
        mean, idle = run.response_tokens, run.idle
        longest = float(most) if run.truncated else min(float(most), 2 * mean)
        told = f"as in the run, {run.steps} steps of it"
    if is_supervised(recipe):
        told, idle = told.replace("a guess: --from RUN knows better", "a guess"), 0.0
    return Workload(
        prompts=counts.prompts,
        sessions=counts.sessions,
        greedy=counts.baselines,
        prompt_tokens=prompt_tokens,
        response_tokens=mean,
        longest=longest,
        idle=idle,
        told=told,
    )


def decode_steps(work: Workload, replicas: int, slots: int) -> float:
    """Forward calls of one engine: all sessions at once, or in waves where they outnumber its slots."""
    sessions = work.rows / replicas
    return work.longest + max(0.0, sessions / slots - 1) * work.response_tokens
