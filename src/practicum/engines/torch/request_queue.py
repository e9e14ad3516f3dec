"""Requests of the torch engine, and the queue of those that wait for a slot."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from practicum.engines.protocol import LOGPROBS_ONLY, Sampling, ScoreOptions, ScoreRequest
from practicum.engines.torch.engine_thread import Job
from practicum.engines.torch.prompt_cache import CachedSequence, PrefilledPrompt, PromptKey
from practicum.engines.torch.sampler import Draw


@dataclass(eq=False, slots=True)
class GenerateJob(Job):
    """A response to sample."""

    prompt: PromptKey
    sampling: Sampling
    draw: Draw
    key: int
    keep: bool = False
    """True if a later prompt is likely to extend the response."""
    written: tuple[int, ...] = ()
    """Number of final prompt tokens that are confirmed tokens of the response (`confirm.py`)."""
    prompt_experts: Tensor | None = field(default=None, init=False)
    """Experts of the prompt, once computed (MoE models only)."""


@dataclass(eq=False, slots=True)
class ScoreJob(Job):
    """A sequence to score."""

    request: ScoreRequest
    options: ScoreOptions = LOGPROBS_ONLY

    @property
    def prefix(self) -> PromptKey:
        """Everything before the tokens to score, including images."""
        return PromptKey.of(self.request.ids[: self.request.start], self.request.images)

    @property
    def adapter(self) -> str:
        """Empty for the base."""
        return self.request.adapter or ""

    @property
    def targets(self) -> Sequence[int]:
        return self.request.ids[self.request.start :]


class Admission(NamedTuple):
    """Requests of a prompt that receive slots, and the computed part of the prompt: all, a prefix, or
    nothing."""

    prompt: PromptKey
    jobs: list[GenerateJob]
    computed: PrefilledPrompt | None
    kept: CachedSequence | None = None


class RequestQueue:
    """Queue of requests, first come first served by prompt. Requests with equal prompts are admitted
    together.

    So at most one computed prompt has waiting requests, and it is kept until all are admitted.
    """

    def __init__(self) -> None:
        self._groups: dict[PromptKey, deque[GenerateJob]] = {}
        self._kept: dict[PromptKey, PrefilledPrompt] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, job: GenerateJob) -> None:
        """Append a request, or add it to those with the same prompt."""
        self._groups.setdefault(job.prompt, deque()).append(job)

    def keep(self, prompt: PromptKey, computed: PrefilledPrompt) -> None:
        """Keep a computed prompt while requests for it wait."""
        if prompt in self._groups and prompt not in self._kept:
            self._kept[prompt] = replace(computed, kv=computed.kv.copy(), hidden=computed.hidden.clone())

    def clear(self) -> None:
        self._groups.clear()
        self._kept.clear()

    def take(
        self, slots: int, budget: int, find: Callable[[PromptKey], CachedSequence | None]
    ) -> list[Admission]:
        """Return requests for this many slots whose prompts have at most `budget` tokens not yet computed. A
        first prompt is taken even if it is longer than the budget. `find` looks a prompt up in the cache."""
        taken: list[Admission] = []
        for prompt in list(self._groups):
            if slots == 0:
                break
            computed = self._kept.get(prompt)
            kept = None if computed else find(prompt)
            cost = 0 if computed else len(prompt) - (len(kept) if kept else 0)
            if taken and cost > budget:
                break
            group, jobs = self._groups[prompt], []
            while group and len(jobs) < slots:
                job = group.popleft()
                if not job.abandoned:
                    jobs.append(job)
            if not group:
                del self._groups[prompt]
                self._kept.pop(prompt, None)
            if jobs:
                slots, budget = slots - len(jobs), budget - cost
                taken.append(Admission(prompt, jobs, computed, kept))
        return taken
