"""How a step's batch is cut into optimizer mini-batches, and how many padding rows that takes.

Real rows are shared out first, as if there were no padding; padding rows then fill the mini-batches up to one
size. So padding decides neither which real rows are learnt from together nor how many steps there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, lcm

import numpy as np

from practicum.errors import RecipeError
from practicum.learning.sharing import Group, share, shortest_first
from practicum.recipe.schema.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Cut:
    """What a recipe asks for: a number of optimizer steps (`parts`), or of rows in each (`rows`).

    `path` is where the recipe says so.
    """

    parts: int = 1
    rows: int | None = None
    path: str = "train.minibatch_rows"

    def steps(self, real_rows: int) -> int:
        """Optimizer steps of one pass: none would be without a real row."""
        return min(self.parts, real_rows) if self.rows is None else ceil(real_rows / self.rows)

    def multiple(self, data_parallel: int) -> int:
        """What the number of rows must be a multiple of, for mini-batches that each cut evenly over ranks."""
        if self.rows is None:
            return self.parts * data_parallel
        if self.rows % data_parallel:
            more = ceil(self.rows / data_parallel) * data_parallel
            expected = f"a multiple of the {data_parallel} data-parallel ranks"
            raise RecipeError(self.path, str(self.rows), expected, f"Set it to {more}.")
        return self.rows

    def size(self, rows: int) -> int:
        """Rows of a mini-batch, padding and all, of a batch of `rows`."""
        return rows // self.parts if self.rows is None else self.rows


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Rows of one optimizer step, as places in the batch; there is a real one in each."""

    real: list[int]
    padding: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        """All of them, the real ones first."""
        return self.real + self.padding

    def __len__(self) -> int:
        return len(self.real) + len(self.padding)


def student_cut(recipe: Recipe) -> Cut:
    """How the student's batch is cut."""
    return Cut(recipe.train.minibatches, recipe.train.minibatch_rows)


def critic_cut(recipe: Recipe) -> Cut:
    """How the critic's batch is cut: as the student's, unless the recipe says otherwise."""
    if recipe.critic is None or recipe.critic.minibatch_rows is None:
        return student_cut(recipe)
    return Cut(rows=recipe.critic.minibatch_rows, path="critic.minibatch_rows")


def running_cuts(recipe: Recipe, step: int) -> list[Cut]:
    """The cuts of the updates that this step (from 1 on) really runs."""
    if recipe.critic is None:
        return [student_cut(recipe)]
    if step <= recipe.critic.warmup_steps:
        return [critic_cut(recipe)]
    return [critic_cut(recipe), student_cut(recipe)]


def needed_multiple(data_parallel: int, cuts: Iterable[Cut]) -> int:
    """What the number of rows must be a multiple of, for every one of these cuts."""
    return lcm(data_parallel, *(cut.multiple(data_parallel) for cut in cuts))


def padding_needed(real: int, multiple: int) -> int:
    """Padding rows that bring so many real ones to the multiple."""
    return -real % multiple


def spare_padding(largest: int, steps: int, data_parallel: int) -> int:
    """Further padding rows that level mini-batches and ranks if sessions of `largest` rows stay whole."""
    return steps * largest * data_parallel if largest > 1 else 0


def spread(
    prompts: Sequence[int],
    sessions: Sequence[int],
    padding: Sequence[bool],
    cut: Cut,
    *,
    seed: int,
    step: int,
    epoch: int,
    whole_sessions: bool = False,
    ranks: int = 1,
) -> list[Minibatch]:
    """The mini-batches of one pass over a batch, given each row's prompt, session and whether it is padding.

    Their real rows differ in number by at most one; prompt groups stay together where that allows it, and
    sessions are cut only where nothing else fits. With `whole_sessions` none is cut, and mini-batches differ
    by at most the rows of the largest. Padding makes them equally large, a multiple of `ranks` that has room
    for whole sessions on each; what is left is in none. Groups are shuffled by (seed, step, epoch); the rows
    of a mini-batch stay in their order.
    """
    groups = _group(prompts, sessions, padding)
    real = sum(len(session) for group in groups for session in group)
    steps = cut.steps(real)
    if whole_sessions:
        steps = min(steps, sum(map(len, groups)))
    if steps > 1:
        random = np.random.Generator(np.random.Philox(key=[seed, step * 1_000_003 + epoch]))
        groups = [groups[i] for i in random.permutation(len(groups))]
    parts = share(groups, _even(real, steps), whole_sessions=whole_sessions)
    shared = [sorted(rows) for rows in parts if rows]
    spare = [row for row, is_padding in enumerate(padding) if is_padding]
    needed = max(map(len, shared), default=0)
    if whole_sessions:
        names = list(zip(prompts, sessions, strict=True))
        needed = max((_even_need([names[row] for row in rows], ranks) for rows in shared), default=0)
    return _fill(shared, spare, cut.size(len(prompts)), needed, ranks)


def _group(prompts: Sequence[int], sessions: Sequence[int], padding: Sequence[bool]) -> list[Group]:
    """Real rows by prompt and session, in order of first appearance."""
    groups: dict[int, dict[int, list[int]]] = {}
    for row, (prompt, session, is_padding) in enumerate(zip(prompts, sessions, padding, strict=True)):
        if not is_padding:
            groups.setdefault(prompt, {}).setdefault(session, []).append(row)
    return [list(group.values()) for group in groups.values()]


def _even(rows: int, parts: int) -> list[int]:
    """Sizes of so many parts that differ by at most one."""
    return [rows // parts + (part < rows % parts) for part in range(parts)]


def _up(number: int, multiple: int) -> int:
    return number + -number % multiple


def _even_need(sessions: Sequence[Hashable], ranks: int) -> int:
    """Rows, padding and all, with which ranks have equally many though no session is cut."""
    sizes = list(Counter(sessions).values())
    return ranks * max(sum(sizes[i] for i in part) for part in shortest_first(sizes, ranks))


def _fill(shared: list[list[int]], spare: list[int], size: int, needed: int, ranks: int) -> list[Minibatch]:
    """Padding rows to the mini-batches, so that all have one size, at least the rows that are needed."""
    if not shared:
        return []
    total = sum(map(len, shared)) + len(spare)
    size = min(size, total // len(shared)) // ranks * ranks
    size = max(size, size + _up(needed - size, ranks))
    minibatches = []
    for real in shared:
        room = max(size - len(real), 0)
        minibatches.append(Minibatch(real, spare[:room]))
        spare = spare[room:]
    return minibatches
