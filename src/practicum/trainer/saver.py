"""Write checkpoints: every N steps, every 10 minutes, and of the last finished step after an error."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from practicum.errors import CheckError, PracticumError, machine_trouble
from practicum.recipe.schema.recipe import Checkpoint
from practicum.runtime.random_state import random_state
from practicum.runtime.start_roles import Roles
from practicum.trainer.checkpoints import Checkpoints, Progress
from practicum.trainer.run_folder import RunFolder
from practicum.trainer.step import StepRunner

EVERY_MINUTES = 10
"""Minutes between checkpoints."""


class Saver:
    """Writes the checkpoints of a run. A checkpoint is of a mark between two steps."""

    def __init__(self, rules: Checkpoint, folder: RunFolder, roles: Roles, runner: StepRunner) -> None:
        self.rules, self.folder, self.roles, self.runner = rules, folder, roles, runner
        self.checkpoints = Checkpoints(folder.checkpoints, rules.keep_last)
        self._mark = Progress()
        self._random: dict[str, Any] = {}
        self._updates: tuple[int, ...] = ()
        """Number of optimizer steps at the mark. While it is unchanged, the roles' state is the mark's."""
        self._failed: int | None = None
        """Step whose checkpoint could not be written."""
        self._saved_at = time.monotonic()

    def mark(self, progress: Progress, seconds: float) -> None:
        """Mark the state of the run between two steps. `seconds` is its duration so far."""
        roles = self.roles
        progress.version, progress.kl = roles.version, roles.kl_state()
        progress.stream = self.runner.sampling.stream_state(progress.step + 1)
        following, position = self.runner.next_prompt, progress.stream["position"]
        if following not in (None, position):
            raise CheckError(
                f"a checkpoint of step {progress.step} would continue with prompt {position}, and the prompt "
                f"after that step's last one is {following}: a resumed run would skip or "
                "repeat prompts"
            )
        progress.positions = self.folder.positions()
        self._mark = replace(progress, seconds=seconds)
        self._random, self._updates = random_state(), roles.updates()

    def is_due(self, step: int) -> bool:
        by_clock = time.monotonic() - self._saved_at >= 60 * EVERY_MINUTES
        return by_clock or (self.rules.every > 0 and step % self.rules.every == 0)

    def save(self, *, rows: bool = True) -> None:
        """Write a checkpoint of the mark. The state of the roles must not have changed since."""
        began, step = time.perf_counter(), self._mark.step
        # With a lag, later steps keep sampling. Only rows that are done now are written.
        done = [rollout.done_rows() for rollout in self.roles.rollouts] if rows else []
        keys = [key for keys, _ in done for key in keys]
        window = {"done": keys, "rewarded": [name for _, names in done for name in names]}

        def write(folder: Path) -> None:
            self.roles.save(folder, keys)
            torch.save(self._random, folder / "random.pt")

        try:
            path = self.checkpoints.save(replace(self._mark, window=window), write)
        except Exception as error:
            self._failed = step
            if (trouble := machine_trouble(error)) is None:
                raise
            raise PracticumError(f"no checkpoint of step {step} could be written: {trouble}") from error
        self._saved_at = time.monotonic()
        self.folder.log(f"checkpoint {path.name} in {time.perf_counter() - began:.2f} s")

    def rescue(self) -> None:
        """After an error, write a checkpoint of the mark, unless it exists or no step was trained.

        Raise PracticumError if the weights have changed since the mark. Without a lag, the checkpoint has no
        rows, and the failed step is sampled again.
        """
        if self._mark.step in (0, self._failed, *self.checkpoints.steps()):
            return
        if self.roles.updates() != self._updates:
            raise PracticumError("the student or the critic was already partly updated")
        self.save(rows=len(self.roles.rollouts) > 1)


def crash_cost(rules: Checkpoint, steps: int) -> str:
    steps_lost = f"{rules.every} steps or " if rules.every and rules.every < steps else ""
    killed = f"at most {steps_lost}{EVERY_MINUTES} minutes and a step"
    return f"after a crash: an error loses the current step, kill -9 or an error in an update {killed}"
