"""With a lag: the steps under way on the sampling side, each in its own thread, ahead of the learner."""

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
from practicum.trainer.schedule import Schedule

TELL_S, TELL_MOST_S = 5.0, 60.0
"""Seconds after which it is told what the learner waits for; then after twice as many, up to the second."""


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
        first, trains = self.schedule.weights_of(step.number), step.number - 1
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
            under_way = _UnderWay(self.sampler.begin(number, self.schedule.copy_of(number)))
            name = f"practicum-step-{number}"
            under_way.thread = threading.Thread(
                target=self._sample, args=(under_way,), name=name, daemon=True
            )
            self._under_way[number], self._begun = under_way, number
            under_way.thread.start()

    def _sample(self, under_way: _UnderWay) -> None:
        step = under_way.step
        try:
            weights = self.schedule.weights_of(step.number)
            with self._scope, self.roles.weights(step.copy, weights):
                if published := self._published.pop(weights, None) if weights else None:
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
