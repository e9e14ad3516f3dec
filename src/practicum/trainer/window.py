"""With a lag: the steps under way on the sampling side, each in its own thread, ahead of the learner.

Which weights sample which step, and which steps are under way: by the recipe, never by the clock.

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

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from practicum.concurrency.event_loop import UNWIND_S, WorkScope
from practicum.errors import DeadlineError
from practicum.recipe.derived import sampling_engines, sampling_s
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.start_roles import Roles
from practicum.trainer.sample_step import Metrics, SampledStep, StepSampler

TELL_S, TELL_MOST_S = 5.0, 60.0
"""Seconds after which it is told what the learner waits for; then after twice as many, up to the second."""


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


@dataclass(slots=True)
class _UnderWay:
    step: SampledStep
    began: float = field(default_factory=time.monotonic)
    thread: threading.Thread | None = None
    is_done: bool = False
    error: BaseException | None = None


class Window:
    """Samples steps ahead of the learner, as far as the schedule allows."""

    def __init__(self, recipe: Recipe, schedule: Schedule, roles: Roles, sampler: StepSampler) -> None:
        self.recipe, self.schedule, self.roles, self.sampler = recipe, schedule, roles, sampler
        self.on_wait: Callable[[str], None] = lambda sentence: None
        """Told what the learner waits for, again and again while it does."""
        self._under_way: dict[int, _UnderWay] = {}
        self._learnt = self._begun = 0
        self._published: dict[int, float] = {}
        """When weights were there, by the step that they are after."""
        self._changed = threading.Condition()
        self._scope = WorkScope()
        self._draw_error: BaseException | None = None
        # Where the prompts of a step begin follows from the refills of the one before; and an engine of all
        # steps takes the weights of each in turn.
        self._one_by_one = recipe.buffer.filter_flat_groups or sampling_engines(recipe) == 1

    def begin(self, number: int) -> SampledStep:
        """The next step that the learner needs: it is under way, or sampled already."""
        self.move(number - 1)
        if number not in self._under_way and self._draw_error is not None:
            raise self._draw_error
        return self._under_way[number].step

    def finish(self, step: SampledStep) -> None:
        """Wait until a step is sampled; what went wrong there is raised here."""
        under_way, began = self._under_way[step.number], time.perf_counter()
        # An evaluation may have its turn before it, on an engine of all steps.
        turns = 2 if sampling_engines(self.recipe) == 1 else 1
        deadline = under_way.began + turns * sampling_s(self.recipe)
        patience = TELL_S
        with self._changed:
            while not self._changed.wait_for(lambda: under_way.is_done, patience):
                self.on_wait(self._waits_for(under_way))
                if time.monotonic() > deadline:
                    raise DeadlineError(f"step {step.number} was not sampled: {self._waits_for(under_way)}")
                patience = min(2 * patience, TELL_MOST_S)
        if under_way.error is not None:
            raise under_way.error
        step.metrics |= self._staleness(step)
        step.timer.seconds["waited"] = time.perf_counter() - began

    def _staleness(self, step: SampledStep) -> Metrics:
        """Steps from the weights of each row's oldest token to those that it trains."""
        first, trains = step.weights, step.number - 1
        steps = {self.roles.version_of(s): s for s in range(trains, first - 1, -1)}
        stale = [trains - steps.get(tags.version_min, first - 1) for tags in step.batch.tags]
        return {"async/staleness": sum(stale) / len(stale), "async/staleness_max": max(stale)}

    def move(self, learnt: int) -> None:
        """This many steps are learnt and their weights published: begin what the schedule lets begin."""
        with self._changed:
            self._learnt, self._begun = learnt, max(self._begun, learnt)
            self._published.setdefault(learnt, time.monotonic())
            for number in [n for n in self._under_way if n <= learnt]:
                del self._under_way[number]
            self._begin_next()

    def stream_state(self, number: int) -> dict[str, int]:
        """The prompt stream's state before a step's first prompt."""
        with self._changed:
            under_way = self._under_way.get(number)
            return self.sampler.stream.state_dict() if under_way is None else under_way.step.stream

    def threads(self) -> list[threading.Thread]:
        """Those that sample the steps under way; each ends when its step is sampled."""
        steps = list(self._under_way.values())
        return [under_way.thread for under_way in steps if under_way.thread is not None]

    def close(self) -> None:
        """End what is under way."""
        self._scope.cancel()
        for thread in self.threads():
            thread.join(UNWIND_S)

    def _begin_next(self) -> None:
        """Begin the steps, in order, whose weights are there; the lock is held."""
        if self._scope.is_cancelled or self._draw_error is not None:
            return
        for number in self.schedule.under_way(self._learnt):
            if number <= self._begun:
                continue
            before = self._under_way.get(number - 1)
            if self._one_by_one and before is not None and not before.is_done:
                return
            if before is not None and before.error is not None:
                return
            copy, weights = self.schedule.copy_of(number), self.schedule.weights_of(number)
            under_way = _UnderWay(self.sampler.begin(number, copy, weights))
            name = f"practicum-step-{number}"
            under_way.thread = threading.Thread(
                target=self._sample, args=(under_way,), name=name, daemon=True
            )
            self._under_way[number], self._begun = under_way, number
            under_way.thread.start()

    def _sample(self, under_way: _UnderWay) -> None:
        step = under_way.step
        try:
            with self._scope, self.roles.weights(step.copy, step.weights):
                if published := self._published.pop(step.weights, None) if step.weights else None:
                    step.timer.seconds["publish_lag"] = time.monotonic() - published
                self.sampler.sample(step)
        except BaseException as error:  # raised by `finish`, in the step's turn
            under_way.error = error
        with self._changed:
            under_way.is_done = True
            if self._one_by_one and under_way.error is None:
                try:
                    self._begin_next()
                except BaseException as error:  # of drawing the next step's prompts: raised by its `begin`
                    self._draw_error = error
            self._changed.notify_all()

    def _waits_for(self, under_way: _UnderWay) -> str:
        """What a step under way is at, and which groups are not done."""
        step, waited = under_way.step, time.monotonic() - under_way.began
        groups = self.roles.rollouts[step.copy].open_groups()
        stage = step.timer.stage or "new weights"
        if stage != "rollout" or not groups:
            return f"{stage} of step {step.number}, {waited:.0f} s after it began"
        named = "; ".join(
            f"{prompt}: {count} session{'s' * (count > 1)} not done" for prompt, count in groups[:2]
        )
        more = f" and {len(groups) - 2} more groups" if len(groups) > 2 else ""
        return f"{named}{more}, {waited:.0f} s after step {step.number} began"
