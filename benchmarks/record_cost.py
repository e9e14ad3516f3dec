"""What recording costs: the processor time of the recording code itself, and whole steps with and without it.

The GRPO step and the distillation step of the other benchmarks, one thread. Three processes take turns, with
nothing, the default and everything recorded. Whole steps vary by more than recording costs, so each process
also clocks the code that only runs for the record, by the processor time of the thread that runs it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks import harness
from benchmarks.clusters import wants_quick
from benchmarks.harness import Channel, Contender, Measured
from benchmarks.model import DIGITS, model_folder
from benchmarks.stepping import Steps, make_distillation, make_recipe, mean
from practicum.learning import logprobs
from practicum.learning.update_trace import UpdateTrace
from practicum.recipe.schema.recipe import Recipe, Track
from practicum.records.recorder import Recorder
from practicum.trainer.samples import StepSamples

SIZES: dict[str, Any] = {"prompts": 32, "samples": 8, "max_new_tokens": 32, "digits": DIGITS, "lr": 1e-5}
RECORDS: dict[str, int | str] = {"none": "none", "default": Track().record, "all": "all"}
ROUNDS, BLOCK = 5, 1
"""Rounds, and the steps that a contender takes in one turn."""
GOAL = 0.02
"""Share of a step that recording at the default may cost."""
CLOCKED: Mapping[str, tuple[tuple[Any, str], ...]] = {
    "columns as text, and files": ((Recorder, "add"),),
    "times and bytes of stages": ((Recorder, "span"), (Recorder, "count")),
    "numbers of the update": ((UpdateTrace, "add"), (UpdateTrace, "add_top"), (UpdateTrace, "columns")),
    "most likely tokens": ((logprobs, "top_tokens"),),
    "answers as text": ((StepSamples, "rolled_out"), (StepSamples, "learnt")),
}
"""The code that only runs for the record."""


class Clocks:
    """Processor seconds spent in functions, by what they do; a call inside of another counts once."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inside = False

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Put a function behind a clock."""
        inner = getattr(owner, name)
        if name == "span":
            setattr(owner, name, self._context(inner, part))
            return

        def clocked(*args: Any, **named: Any) -> Any:
            with self._running(part):
                return inner(*args, **named)

        setattr(owner, name, clocked)

    def _context(self, inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        """A context manager: its begin and its end count, not what runs inside."""

        @contextmanager
        def clocked(*args: Any, **named: Any) -> Iterator[None]:
            with self._running(part):
                context = inner(*args, **named)
                context.__enter__()
            try:
                yield
            finally:
                with self._running(part):
                    context.__exit__(None, None, None)

        return clocked

    @contextmanager
    def _running(self, part: str) -> Iterator[None]:
        if self._inside:
            yield
            return
        self._inside, began = True, time.thread_time()
        try:
            yield
        finally:
            self.spent[part] += time.thread_time() - began
            self._inside = False

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last call."""
        found = {part: self.spent[part] for part in CLOCKED}
        self.spent.clear()
        return found


def step(channel: Channel, kind: str, record: int | str) -> None:
    """Steps of one kind with so much recorded; of the recording code, seconds by part."""
    recipe = _recipe(kind)
    track = recipe.track.model_copy(update={"record": record})
    clocks = Clocks()
    for part, functions in CLOCKED.items():
        for owner, name in functions:
            clocks.watch(owner, name, part)
    with Steps(recipe.model_copy(update={"track": track, "name": f"record-{kind}-{record}"})) as steps:

        def one() -> Measured:
            steps.run.samples.clear()
            clocks.take()
            measured = steps.step()
            return measured | clocks.take()

        channel.serve(lambda turn: mean([one() for _ in range(BLOCK)]))


def _recipe(kind: str) -> Recipe:
    if kind == "GRPO":
        return make_recipe("record", **SIZES, threads=1)
    teachers = {"sort": {"model": str(model_folder())}}
    return make_distillation("record", teachers, **SIZES)


def main() -> None:
    """Race the three for both kinds of step, and write the results."""
    model_folder()
    rounds = 1 if wants_quick() else ROUNDS
    raced = {}
    for kind in ("GRPO", "distillation"):
        print(f"recording in a {kind} step")
        contenders = [
            Contender(name, "benchmarks.record_cost:step", {"kind": kind, "record": record})
            for name, record in RECORDS.items()
        ]
        raced[kind] = harness.race(contenders, rounds)
    if wants_quick():
        return
    settings = {**SIZES, "rounds": rounds, "steps_per_round": BLOCK, "goal": GOAL, "parts": list(CLOCKED)}
    harness.write_results("record_cost", {"settings": settings, "raced": raced})


if __name__ == "__main__":
    main()
