"""Which weights sample which step, and which steps are under way: by the recipe, never by the clock.

Weights s are those after step s; weights 0 are the start. Step t, from 1 on, changes weights t - 1 into
weights t. Its batch is sampled by weights t - 1 - lag, or by weights 0 while there are no such:

    lag 2     step 1   step 2   step 3   step 4   step 5
    sampled   0        0        0        1        2         by these weights
    trains    0        1        2        3        4         these weights
    stale     0        1        2        2        2         steps

So while the learner works on step t, steps t + 1 to t + lag are sampled: the weights of all are there.
Batches are taken in order, and none is left out, however long it takes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of a run with this lag and number of steps."""

    lag: int
    steps: int

    @property
    def copies(self) -> int:
        """Copies of the weights that sample, each of its own age: one for each step that may be under way."""
        return self.lag + 1

    def weights_of(self, step: int) -> int:
        """The weights that sample a step's batch."""
        return max(0, step - 1 - self.lag)

    def copy_of(self, step: int) -> int:
        """The copy that samples a step's batch; weights s are always in copy s % copies, if s > 0."""
        return step % self.copies

    def under_way(self, learnt: int) -> range:
        """The steps that may be sampled once this many are learnt: the weights of each are there."""
        return range(learnt + 1, min(learnt + 1 + self.lag, self.steps) + 1)
