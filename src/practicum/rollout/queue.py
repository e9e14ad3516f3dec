"""Requests on their way through the torch engine: what they ask for, and the queue in front of the slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from practicum.rollout.desk import Job
from practicum.rollout.kv import PromptKv
from practicum.rollout.protocol import Sampling
from practicum.rollout.sampler import Draw


@dataclass(eq=False, slots=True)
class GenerateJob(Job):
    """One answer to sample."""

    prompt: tuple[int, ...]
    sampling: Sampling
    draw: Draw
    key: int


@dataclass(eq=False, slots=True)
class ScoreJob(Job):
    """Logprobs to compute of ids[start:]."""

    ids: Sequence[int]
    start: int
    top_k: int = 0
    temperature: float = 1.0
    hidden: bool = False
    outputs: int | None = None
    """How many of the model's outputs count; all if None."""


@dataclass(slots=True)
class Prompt:
    """A prompt that was computed: keys and values, and the last hidden state of its last token."""

    kv: PromptKv
    hidden: Tensor


class Admission(NamedTuple):
    """Requests of one prompt that get slots now, and the prompt if it is already computed."""

    prompt: tuple[int, ...]
    jobs: list[GenerateJob]
    computed: Prompt | None


class Queue:
    """Waiting requests, first come first served by prompt: those with equal prompts go together.

    So at most one prompt at a time is computed but still has requests waiting; it is kept until they are in.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], deque[GenerateJob]] = {}
        self._kept: dict[tuple[int, ...], Prompt] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, job: GenerateJob) -> None:
        """Wait behind those who came before, or beside those who have the same prompt."""
        self._groups.setdefault(job.prompt, deque()).append(job)

    def keep(self, prompt: tuple[int, ...], computed: Prompt) -> None:
        """Remember a computed prompt while requests for it wait."""
        if prompt in self._groups and prompt not in self._kept:
            self._kept[prompt] = Prompt(computed.kv.copy(), computed.hidden.clone())

    def clear(self) -> None:
        """Forget everything."""
        self._groups.clear()
        self._kept.clear()

    def take(self, slots: int, budget: int) -> list[Admission]:
        """Requests for this many slots whose prompts not yet computed have at most `budget` tokens.

        A first prompt is taken even if it is longer than the budget.
        """
        taken: list[Admission] = []
        for prompt in list(self._groups):
            computed = self._kept.get(prompt)
            cost = 0 if computed else len(prompt)
            if slots == 0 or (taken and cost > budget):
                break
            jobs = self._pop(prompt, slots)
            if jobs:
                slots, budget = slots - len(jobs), budget - cost
                taken.append(Admission(prompt, jobs, computed))
        return taken

    def _pop(self, prompt: tuple[int, ...], most: int) -> list[GenerateJob]:
        group, jobs = self._groups[prompt], []
        while group and len(jobs) < most:
            job = group.popleft()
            if not job.abandoned:
                jobs.append(job)
        if not group:
            del self._groups[prompt]
            self._kept.pop(prompt, None)
        return jobs
