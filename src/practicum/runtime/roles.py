"""Who takes part in a run, as the trainer sees them: keys and tags go in and out, never a tensor.

Each runtime has its own: `local.LocalRoles` in this process, `cluster.roles.RayRoles` on Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key
from practicum.dataplane.store import Store
from practicum.roles.student import UpdateReport
from practicum.sessions.attempts import Attempt
from practicum.tasks.prompts import Prompt


class RolloutStage(Protocol):
    """Rolls out and judges; one for training, one for evaluation."""

    def demonstrate(self, prompts: Sequence[Prompt], partition: str) -> BatchRef:
        """Write what an expert does with each prompt: rows for supervised training."""
        ...

    def rollout(self, attempts: Sequence[Attempt], partition: str, *, seed: int) -> BatchRef:
        """Run sessions at once and write their rows; the batch is in the order of its keys."""
        ...

    def reward(self, batch: BatchRef) -> dict[str, list[float]]:
        """Judge finished sessions; gives the scores of each reward function and model, for metrics."""
        ...

    def take_hidden_share(self) -> float | None:
        """Of the time in which models with resources of their own scored finished sessions, the share that
        other sessions still rolled out; since this was asked last. None if there was none."""
        ...

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop what is remembered of rows that leave the store."""
        ...


class Roles(Protocol):
    """All roles of a run. What the plan leaves out is never called."""

    ranks: int
    """Data-parallel ranks of the learner."""
    stop: frozenset[int]
    """Tokens that end an answer."""

    @property
    def store(self) -> Store:
        """The data plane; the trainer asks it for keys and tags alone."""
        ...

    @property
    def practice(self) -> RolloutStage: ...

    @property
    def examiner(self) -> RolloutStage: ...

    @property
    def version(self) -> int:
        """Updates that the student's weights have had."""
        ...

    def describe(self) -> list[str]:
        """Engines with processes of their own, in sentences for the log: what they hold, their threads."""
        ...

    def refresh_copies(self, step: int) -> None:
        """Before a step: teachers that are copies of the student take its weights when the recipe says."""
        ...

    def teach(self, batch: BatchRef) -> None:
        """The teachers score what they have not scored during the rollout."""
        ...

    def teachers_spent(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and wakes of each teacher since this was asked last."""
        ...

    def pad(self, partition: str, count: int) -> BatchRef:
        """Write `count` rows that do nothing, with every field that the plan's stages write."""
        ...

    def old_logprobs(self, batch: BatchRef) -> None: ...

    def ref_logprobs(self, batch: BatchRef) -> None: ...

    def values(self, batch: BatchRef) -> None: ...

    def advantages(self, batch: BatchRef, baselines: Mapping[int, float]) -> dict[str, float]:
        """What each token was worth; gives statistics. `baselines` are greedy rewards, for ReMax."""
        ...

    def update_critic(self, batch: BatchRef, step: int) -> dict[str, float]: ...

    def update_student(self, batch: BatchRef, step: int) -> UpdateReport: ...

    def sync_weights(self) -> None:
        """Give the engines the learner's weights and version."""
        ...

    def texts(self, batch: BatchRef) -> list[tuple[str, str]]:
        """Prompt and response of each row as people read them."""
        ...

    def kl_state(self) -> dict[str, float]:
        """Of the controller of a KL in the reward."""
        ...

    def updates(self) -> tuple[int, ...]:
        """Optimizer steps begun so far, wherever they are counted: while it stays, what is learnt does."""
        ...

    def save(self, folder: Path, *, rows: bool = True) -> None:
        """Write all that the roles hold between two steps; without `rows`, with an empty store."""
        ...

    def load(self, folder: Path, kl_state: Mapping[str, float]) -> None:
        """Go on from what `save` wrote; the engines get the weights too."""
        ...

    def export(self, folder: Path) -> None:
        """Write the student in HuggingFace format, with its tokenizer and processor."""
        ...

    def incidents(self) -> dict[str, Any]:
        """What went wrong and was mended since this was asked last, as metrics; nothing if nothing did."""
        ...

    def close(self) -> None:
        """Stop what runs in the background."""
        ...
