"""When checkpoints are written: by steps, by the clock, and of the last finished step after an error."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from practicum.errors import CheckError, PracticumError, machine_trouble
from practicum.recipe.schema.recipe import Checkpoint, Recipe
from practicum.runtime.random_state import random_state
from practicum.runtime.start_roles import Roles
from practicum.trainer.checkpoints import Checkpoints, Progress
from practicum.trainer.run_folder import RunFolder
from practicum.trainer.step import StepRunner


@dataclass(frozen=True, slots=True)
class Mark:
    """A run between two steps, without what the roles hold."""

    progress: Progress
    random: dict[str, Any]
    updates: tuple[int, ...]
    """Optimizer steps begun by then: while there are no more, the roles hold what they held."""


class Saver:
    """Writes the checkpoints of one run. A checkpoint is always of a mark, never of the middle of a step."""

    def __init__(self, recipe: Recipe, folder: RunFolder, roles: Roles, runner: StepRunner) -> None:
        self.rules, self.folder, self.roles, self.runner = recipe.checkpoint, folder, roles, runner
        self.checkpoints = Checkpoints(folder.checkpoints, recipe.checkpoint.keep_last)
        self._mark: Mark | None = None
        self._failed: int | None = None
        """The step whose checkpoint could not be written."""
        self._saved_at = time.monotonic()

    def mark(self, progress: Progress, seconds: float) -> None:
        """Note the run as it is now, between two steps; `seconds` is the time that it has taken."""
        roles = self.roles
        progress.version, progress.kl = roles.version, roles.kl_state()
        progress.stream = self.runner.stream_state(progress.step + 1)
        following, position = self.runner.next_prompt, progress.stream["position"]
        if following not in (None, position):
            raise CheckError(
                f"a checkpoint of step {progress.step} would continue with prompt {position}, and the prompt "
                f"after that step's last one is {following}: a resumed run would pass over prompts, or "
                "repeat some"
            )
        progress.positions = self.folder.positions()
        progress.record_sums = self.folder.record_sums()
        noted = replace(progress, seconds=seconds)
        self._mark = Mark(noted, random_state(), roles.updates())

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of this step is to be written, by its number or by the clock."""
        every, minutes = self.rules.every, self.rules.every_minutes
        by_clock = minutes and time.monotonic() - self._saved_at >= 60 * minutes
        return bool(by_clock or (every and step % every == 0))

    def save(self, *, rows: bool = True) -> None:
        """Write a checkpoint of the mark, to which the roles still correspond."""
        mark = self._mark
        assert mark is not None, "a run is marked before its first step"
        began = time.perf_counter()
        # Before the rows are written: those of sessions that are done by then are among them.
        progress = replace(mark.progress, window=window_state(self.roles) if rows else {})

        def write(folder: Path) -> None:
            self.roles.save(folder, rows=rows)
            torch.save(mark.random, folder / "random.pt")

        try:
            path = self.checkpoints.save(progress, write)
        except Exception as error:
            self._failed = mark.progress.step
            if (trouble := machine_trouble(error)) is None:
                raise
            sentence = f"no checkpoint of step {mark.progress.step} could be written: {trouble}"
            raise PracticumError(sentence) from error
        self._saved_at = time.monotonic()
        self.folder.log(f"checkpoint {path.name} in {time.perf_counter() - began:.2f} s")

    def rescue(self) -> None:
        """After an error: a checkpoint of the mark, unless there is one or nothing was learnt yet.

        A PracticumError says why there can't be one. Without a lag, no rows are in it: the failed step is
        sampled again.
        """
        mark = self._mark
        if mark is None or mark.progress.step in (0, self._failed, *self.checkpoints.steps()):
            return
        if self.roles.updates() != mark.updates:
            raise PracticumError("the student or the critic was already partly updated")
        self.save(rows=self.runner.schedule.lag > 0)


def window_state(roles: Roles) -> dict[str, Any]:
    """The sessions of steps under way that are done, as a checkpoint names them."""
    done, rewarded = zip(*(rollout.done_rows() for rollout in roles.rollouts), strict=True)
    return {
        "done": [key for keys in done for key in keys],
        "rewarded": [n for names in rewarded for n in names],
    }


def best_metric(recipe: Recipe) -> str | None:
    """The metric whose best checkpoint is kept; None if there is none to choose by."""
    name, rules = recipe.checkpoint.keep_best, recipe.eval
    if name != "auto":
        return name
    if not rules.every:
        return None
    return "eval/greedy" if rules.greedy else f"eval/mean@{rules.samples}"


def crash_cost(rules: Checkpoint, steps: int) -> str:
    """What is lost when a run ends before its time, in a sentence."""
    ways = [f"{rules.every} steps"] if rules.every and rules.every < steps else []
    ways += [f"{rules.every_minutes:g} minutes and a step"] if rules.every_minutes else []
    killed = f"at most {' or '.join(ways)}" if ways else "the whole run: set checkpoint.every_minutes"
    return f"a crash: an error costs the step under way; kill -9, or an error amid an update, {killed}"
