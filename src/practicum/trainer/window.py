"""Sample steps ahead of the learner (rollout.lag), each in a separate thread.

The recipe alone determines which weights sample which step and which steps are in flight, not timing.

Weights s are those after step s, and weights 0 the initial ones. Step t ≥ 1 updates weights t - 1 to weights
t. Its batch is sampled with weights max(0, t - 1 - lag):

    lag 2     step 1   step 2   step 3   step 4   step 5
    sampled   0        0        0        1        2         by these weights
    trains    0        1        2        3        4         these weights
    stale     0        1        2        2        2         steps

While the learner works on step t, steps t + 1 to t + lag are sampled, as their weights exist. Batches are
trained on in order, and none is dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from practicum.concurrency.event_loop import UNWIND_S, WorkScope
from practicum.dataplane.stages import Plan
from practicum.errors import DeadlineError
from practicum.observe.records.recorder import Recorder
from practicum.recipe.schema.recipe import Recipe
from practicum.runtime.start_roles import Roles
from practicum.tasks.stream import PromptStream
from practicum.trainer.sample_step import SampledStep, StepSampler

TELL_S, TELL_MOST_S = 5.0, 60.0
"""First and maximum interval between 'learner is waiting' messages (exponential backoff)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of a run with this lag and number of steps."""

    lag: int
    steps: int

    def weights_of(self, step: int) -> int:
        return max(0, step - 1 - self.lag)

    def copy_of(self, step: int) -> int:
        """Return which of lag + 1 copies samples a step. Weights s > 0 are always in copy s % (lag + 1)."""
        return step % (self.lag + 1)

    def in_flight(self, learnt: int) -> range:
        """Return the steps that can be sampled after `learnt` updates, because their weights exist."""
        return range(learnt + 1, min(learnt + 1 + self.lag, self.steps) + 1)


@dataclass(slots=True)
class _UnderWay:
    step: SampledStep
    began: float = field(default_factory=time.monotonic)
    thread: threading.Thread | None = None
    is_done: bool = False
    error: BaseException | None = None


class Window:
    """Samples steps ahead of the learner by a fixed schedule."""

    def __init__(
        self,
        sampler: StepSampler,
        on_stage: Callable[[str], None] = lambda name: None,
        on_wait: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """`on_wait` receives a message about what the learner waits for, repeatedly while it waits."""
        recipe = sampler.recipe
        self.sampler, self.roles = sampler, sampler.roles
        self.schedule = Schedule(recipe.rollout.lag, recipe.train.steps)
        self.on_stage, self.on_wait = on_stage, on_wait
        shares_engine = recipe.sampling_engines == 1
        # The refills of a step determine where the next one's prompts begin, and a shared engine loads the
        # weights of each step in turn.
        self._one_by_one = recipe.refills > 0 or shares_engine
        # On a shared engine, an evaluation may precede a step.
        self._deadline_s = recipe.sampling_s * (2 if shares_engine else 1)
        self._under_way: dict[int, _UnderWay] = {}
        self._learnt = self._begun = 0
        self._published: dict[int, float] = {}
        """Publication time of weights, by step."""
        self._changed = threading.Condition()
        self._scope = WorkScope()
        self._draw_error: BaseException | None = None

    def begin(self, number: int) -> SampledStep:
        """Return the learner's next step, which is in flight or already sampled."""
        self.on_stage("waiting for its sessions")
        self.move(number - 1)
        if number not in self._under_way and self._draw_error is not None:
            raise self._draw_error
        return self._under_way[number].step

    def sample(self, step: SampledStep) -> None:
        """Wait until a step is sampled. Raise its error if sampling failed."""
        in_flight, began = self._under_way[step.number], time.perf_counter()
        deadline, patience = in_flight.began + self._deadline_s, TELL_S
        with self._changed:
            while not self._changed.wait_for(lambda: in_flight.is_done, patience):
                self.on_wait(self._waits_for(in_flight))
                if time.monotonic() > deadline:
                    raise DeadlineError(f"step {step.number} was not sampled: {self._waits_for(in_flight)}")
                patience = min(2 * patience, TELL_MOST_S)
        if in_flight.error is not None:
            raise in_flight.error
        # Number of updates between the weights of each row's oldest token and the trained weights.
        first, trains = self.schedule.weights_of(step.number), step.number - 1
        steps = {self.roles.version_of(s): s for s in range(trains, first - 1, -1)}
        stale = [trains - steps.get(tags.version_min, first - 1) for tags in step.batch.tags]
        step.metrics |= {"async/staleness": sum(stale) / len(stale), "async/staleness_max": max(stale)}
        step.timer.seconds["waited"] = time.perf_counter() - began

    def move(self, trained: int) -> None:
        """Start the steps that can be sampled after `trained` steps are trained and published."""
        with self._changed:
            self._learnt, self._begun = trained, max(self._begun, trained)
            self._published.setdefault(trained, time.monotonic())
            for number in [n for n in self._under_way if n <= trained]:
                del self._under_way[number]
            self._begin_next()

    def stream_state(self, number: int) -> dict[str, int]:
        with self._changed:
            in_flight = self._under_way.get(number)
            return self.sampler.stream.state_dict() if in_flight is None else in_flight.step.stream

    def threads(self) -> list[threading.Thread]:
        """Return the sampling threads. Each ends when its step is sampled."""
        return [in_flight.thread for in_flight in list(self._under_way.values()) if in_flight.thread]

    def close(self) -> None:
        self._scope.cancel()
        for thread in self.threads():
            thread.join(UNWIND_S)

    def _begin_next(self) -> None:
        """Start, in order, the steps whose weights exist. The caller holds the lock."""
        if self._scope.is_cancelled or self._draw_error is not None:
            return
        for number in self.schedule.in_flight(self._learnt):
            if number <= self._begun:
                continue
            before = self._under_way.get(number - 1)
            if self._one_by_one and before is not None and not before.is_done:
                return
            if before is not None and before.error is not None:
                return
            rollout = self.roles.rollouts[self.schedule.copy_of(number)]
            version = self.roles.version_of(self.schedule.weights_of(number))
            in_flight = _UnderWay(self.sampler.begin(number, rollout, version))
            name = f"practicum-step-{number}"
            thread = threading.Thread(target=self._sample, args=(in_flight,), name=name, daemon=True)
            in_flight.thread = thread
            self._under_way[number], self._begun = in_flight, number
            thread.start()

    def _sample(self, in_flight: _UnderWay) -> None:
        step, weights = in_flight.step, self.schedule.weights_of(in_flight.step.number)
        try:
            with self._scope, self.roles.weights(self.schedule.copy_of(step.number), weights):
                if published := self._published.pop(weights, None) if weights else None:
                    step.timer.seconds["publish_lag"] = time.monotonic() - published
                self.sampler.sample(step)
        except BaseException as error:  # `sample` raises it in the step's turn
            in_flight.error = error
        with self._changed:
            in_flight.is_done = True
            if self._one_by_one and in_flight.error is None:
                try:
                    self._begin_next()
                except (
                    BaseException
                ) as error:  # drawing the next step's prompts failed, and its `begin` raises this
                    self._draw_error = error
            self._changed.notify_all()

    def _waits_for(self, in_flight: _UnderWay) -> str:
        step, waited = in_flight.step, time.monotonic() - in_flight.began
        stage, unfinished = step.timer.stage or "new weights", list(step.rollout.open.values())
        left = ""
        if stage == "rollout" and unfinished:
            left = f" ({len(unfinished)} not done, the first of {unfinished[0]})"
        return f"{stage} of step {step.number}{left}, {waited:.0f} s after it began"


def make_sampling(
    recipe: Recipe,
    plan: Plan,
    roles: Roles,
    stream: PromptStream,
    recorder: Recorder | None = None,
    *,
    on_stage: Callable[[str], None] = lambda name: None,
    on_wait: Callable[[str], None] = lambda sentence: None,
) -> Window | StepSampler:
    """Return the sampling side of a run, which runs ahead of the learner if the recipe has a lag."""
    if not recipe.rollout.lag:
        return StepSampler(recipe, plan, roles, stream, recorder, on_stage)
    return Window(StepSampler(recipe, plan, roles, stream, recorder), on_stage, on_wait)
