"""What three ways of padding do to one batch: `python -m benchmarks.padding_table` prints the table.

1,030 rows of agents' sessions, most short and a few very long, in optimizer steps of 256 rows over 8 ranks.
No model is needed: all of it follows from which rows are in which step and on which rank.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

from benchmarks.tables import table
from practicum.dataplane.padding_rows import PADDING_TOKENS
from practicum.learning.balance import Parts, assign_ranks, in_order, step_imbalance
from practicum.learning.minibatches import Cut, Minibatch, needed_multiple, padding_needed, spread

ROWS, MINIBATCH, RANKS, SAMPLES, SEED = 1030, 256, 8, 8, 0
TAIL = 1.0
"""Standard deviation of the logarithm of a row's tokens."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Prompt, session, tokens and reward of each row; padding rows come behind the real ones."""

    prompts: list[int]
    sessions: list[int]
    tokens: list[int]
    rewards: list[float]


@dataclass(frozen=True, slots=True)
class Way:
    """Rows of each rank in each optimizer step, and over what the loss is averaged."""

    name: str
    steps: list[Parts]
    over_real: bool

    @property
    def minibatches(self) -> list[list[int]]:
        """Rows of each optimizer step."""
        return [[row for shard in shards for row in shard] for shards in self.steps]

    def real(self, step: int) -> list[int]:
        """Rows of a step that are no padding, a repeated row as often as it is there."""
        return [row for row in self.minibatches[step] if row < ROWS]


def make_rows(count: int = ROWS, minibatch: int = MINIBATCH, ranks: int = RANKS, tail: float = TAIL) -> Rows:
    """Prompts with 8 sessions each; a session leaves 1 to 3 rows and has one reward. Then the padding."""
    draw = random.Random(SEED)
    rows = Rows([], [], [], [])
    session, easy = 0, 0.0
    while len(rows.prompts) < count:
        if session % SAMPLES == 0:
            easy = draw.random()
        reward = float(draw.random() < easy)
        for _ in range(min(draw.randint(1, 3), count - len(rows.prompts))):
            rows.prompts.append(session // SAMPLES)
            rows.sessions.append(session)
            rows.tokens.append(64 + int(draw.lognormvariate(5.5, tail)))
            rows.rewards.append(reward)
        session += 1
    padding = padding_needed(count, needed_multiple(ranks, [Cut(rows=minibatch)]))
    rows.prompts.extend([-1] * padding)
    rows.sessions.extend(-1 - i for i in range(padding))
    rows.tokens.extend([PADDING_TOKENS] * padding)
    rows.rewards.extend([0.0] * padding)
    return rows


def consecutive(rows: Sequence[int]) -> list[Parts]:
    """Steps and shards cut from the rows in their order."""
    starts = range(0, len(rows), MINIBATCH)
    return [[[rows[at + i] for i in shard] for shard in in_order(MINIBATCH, RANKS)] for at in starts]


def cut(rows: Rows, minibatch: int = MINIBATCH, ranks: int = RANKS) -> list[Minibatch]:
    """The optimizer steps of one pass, as a training step has them."""
    padding = [prompt < 0 for prompt in rows.prompts]
    size = Cut(rows=minibatch)
    return spread(rows.prompts, rows.sessions, padding, size, seed=SEED, step=1, epoch=0, ranks=ranks)


def make_ways(rows: Rows) -> list[Way]:
    """The same batch, padded and cut in three ways."""
    count = len(rows.prompts)
    return [
        Way("repeat the first rows", consecutive([*range(ROWS), *range(count - ROWS)]), over_real=False),
        Way("pad at the end", consecutive(range(count)), over_real=False),
        Way("practicum", assign_ranks(cut(rows), rows.tokens, RANKS), over_real=True),
    ]


def real_rows(way: Way, rows: Rows) -> str:
    """How many rows of each step are real, and are there for the first time."""
    seen: set[int] = set()
    told = []
    for step in range(len(way.steps)):
        new = set(way.real(step)) - seen
        again = len(way.real(step)) - len(new)
        told.append(f"{len(new)} + {again} again" if again else f"{len(new)}")
        seen |= new
    return ", ".join(told)


def twice(way: Way, rows: Rows) -> str:
    """Rows that are in more than one place of the pass."""
    counts = Counter(row for minibatch in way.minibatches for row in minibatch)
    return f"{sum(n > 1 for n in counts.values())}"


def last_scale(way: Way, rows: Rows) -> str:
    """The last step's loss relative to the mean over its real rows."""
    real = len(way.real(-1))
    return f"{real / (real if way.over_real else len(way.minibatches[-1])):.3f}"


def last_noise(way: Way, rows: Rows) -> str:
    """Standard error of the mean over the last step's distinct rows, relative to that of an even share."""
    return f"{sqrt(ROWS / len(way.steps) / len(set(way.real(-1)))):.2f}"


def mean_reward(way: Way, rows: Rows) -> str:
    """Mean over all rows that the way can't tell from real ones."""
    every = [row for minibatch in way.minibatches for row in minibatch if row < ROWS or not way.over_real]
    return f"{sum(rows.rewards[row] for row in every) / len(every):.4f}"


def wasted(way: Way, rows: Rows) -> str:
    """Tokens of padding, relative to those of the real rows."""
    every = sum(rows.tokens[row] for minibatch in way.minibatches for row in minibatch)
    return f"{every / sum(rows.tokens[:ROWS]) - 1:.2%}"


def imbalance(way: Way, rows: Rows) -> str:
    """Tokens of the slowest rank of each step over the mean rank's."""
    return f"{step_imbalance(rows.tokens, way.steps) or 0:.3f}"


def idle_ranks(way: Way, rows: Rows) -> str:
    """Ranks that have padding alone in the last step."""
    return f"{sum(all(row >= ROWS for row in shard) for shard in way.steps[-1])} of {RANKS}"


def torn(names: Sequence[int], way: Way) -> str:
    """How many of these have rows in more than one step."""
    homes = Counter(
        name for minibatch in way.minibatches for name in {names[r] for r in minibatch if r < ROWS}
    )
    return f"{sum(n > 1 for n in homes.values())} of {len(homes)}"


LINES: dict[str, Callable[[Way, Rows], str]] = {
    "optimizer steps": lambda way, rows: f"{len(way.steps)}",
    "real rows of each step": real_rows,
    "rows that count twice in the loss": twice,
    "scale of the last step's loss": last_scale,
    "noise of the last step's gradient, relative to an even share": last_noise,
    "mean reward of the metrics": mean_reward,
    "tokens computed for nothing": wasted,
    "tokens of the slowest rank / mean rank": imbalance,
    "ranks with nothing to learn from in the last step": idle_ranks,
    "prompt groups cut between steps": lambda way, rows: torn(rows.prompts, way),
    "sessions cut between steps": lambda way, rows: torn(rows.sessions, way),
}


def padding_table() -> str:
    """The Markdown table."""
    rows = make_rows()
    ways = make_ways(rows)
    head = [f"{ROWS:,} rows, {MINIBATCH} a step, {RANKS} ranks", *(way.name for way in ways)]
    return table(head, [[line, *(count(way, rows) for way in ways)] for line, count in LINES.items()])


if __name__ == "__main__":
    print(padding_table())
