"""Requests on their way through the torch engine: what they ask for, and the queue in front of the slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from practicum.engines.protocol import LOGPROBS_ONLY, Sampling, ScoreOptions, ScoreRequest
from practicum.engines.torch.engine_thread import Job
from practicum.engines.torch.kv_memory import PromptKv
from practicum.engines.torch.sampler import Draw
from practicum.models.images import Images


@dataclass(frozen=True, slots=True)
class PromptKey:
    """Tokens to go on from, with their pictures and what is known of their experts. Equal if all are."""

    ids: tuple[int, ...]
    digest: bytes = b""
    images: Images | None = field(default=None, compare=False)
    experts: Tensor | None = field(default=None, compare=False)
    """Experts that the first tokens are to take [n, L, E], as they did before; MoE models only."""

    @staticmethod
    def of(ids: Sequence[int], images: Images | None, experts: Tensor | None = None) -> PromptKey:
        """These tokens, pictures and experts, ready to be compared."""
        digest = b"" if images is None else images.digest
        if experts is not None:
            digest += blake2b(experts.contiguous().numpy().data.cast("B"), digest_size=16).digest()
        return PromptKey(tuple(ids), digest, images, experts)

    @property
    def pictures(self) -> bytes:
        """The digest of the pictures alone; empty without any."""
        return b"" if self.images is None else self.images.digest

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(eq=False, slots=True)
class GenerateJob(Job):
    """One answer to sample."""

    prompt: PromptKey
    sampling: Sampling
    draw: Draw
    key: int
    keep: bool = False
    """Whether a later prompt is likely to go on from the answer."""
    prompt_experts: Tensor | None = field(default=None, init=False)
    """Of a MoE model, once the prompt is computed."""


@dataclass(eq=False, slots=True)
class ScoreJob(Job):
    """A sequence to score."""

    request: ScoreRequest
    options: ScoreOptions = LOGPROBS_ONLY

    @property
    def prefix(self) -> PromptKey:
        """What comes before the tokens to score, pictures included."""
        return PromptKey.of(self.request.ids[: self.request.start], self.request.images)

    @property
    def targets(self) -> Sequence[int]:
        """The tokens to score."""
        return self.request.ids[self.request.start :]


@dataclass(slots=True)
class PrefilledPrompt:
    """A prompt that was computed: keys and values, and the last hidden state of its last token."""

    kv: PromptKv
    hidden: Tensor
    shift: int = 0
    """How far the positions behind it are from the number of tokens before them; 0 without pictures."""
    experts: Tensor | None = None
    """Experts that its tokens took [P, L, E], MoE models only; on the CPU, in memory of its own."""


@dataclass(eq=False, slots=True)
class CachedSequence:
    """What was computed of a finished sequence: of all its tokens but the last, which was never an input."""

    ids: tuple[int, ...]
    pictures: bytes
    """The digest of the pictures among them."""
    kv: PromptKv
    experts: Tensor | None
    place: int
    """Where it is found: a hash of its tokens."""
    claims: int = 1
    """How many finished sequences with equal tokens it stands for."""

    def __len__(self) -> int:
        return len(self.ids)

    def is_of(self, ids: tuple[int, ...], pictures: bytes, experts: Tensor | None) -> bool:
        """Whether another sequence has all the same."""
        return self.ids == ids and self.pictures == pictures and _agree(self.experts, experts)

    def begins(self, prompt: PromptKey) -> bool:
        """Whether the prompt goes on from these tokens, with the same pictures and experts."""
        alike = len(self) < len(prompt) and self.ids == prompt.ids[: len(self)]
        return alike and self.pictures == prompt.pictures and _agree(self.experts, prompt.experts)


def _agree(kept: Tensor | None, asked: Tensor | None) -> bool:
    """Whether tokens took the experts that they are asked to take, as far as that is asked."""
    if kept is None or asked is None:
        return asked is None
    both = min(len(kept), len(asked))
    return torch.equal(kept[:both], asked[:both])


class Admission(NamedTuple):
    """Requests of one prompt that get slots now, and what is computed of it: all, a beginning, or nothing."""

    prompt: PromptKey
    jobs: list[GenerateJob]
    computed: PrefilledPrompt | None
    kept: CachedSequence | None = None


class RequestQueue:
    """Waiting requests, first come first served by prompt: those with equal prompts go together.

    So at most one prompt at a time is computed but still has requests waiting; it is kept until they are in.
    """

    def __init__(self) -> None:
        self._groups: dict[PromptKey, deque[GenerateJob]] = {}
        self._kept: dict[PromptKey, PrefilledPrompt] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, job: GenerateJob) -> None:
        """Wait behind those who came before, or beside those who have the same prompt."""
        self._groups.setdefault(job.prompt, deque()).append(job)

    def keep(self, prompt: PromptKey, computed: PrefilledPrompt) -> None:
        """Remember a computed prompt while requests for it wait."""
        if prompt in self._groups and prompt not in self._kept:
            self._kept[prompt] = replace(computed, kv=computed.kv.copy(), hidden=computed.hidden.clone())

    def clear(self) -> None:
        """Forget everything."""
        self._groups.clear()
        self._kept.clear()

    def take(
        self,
        slots: int,
        budget: int,
        find: Callable[[PromptKey], CachedSequence | None] = lambda prompt: None,
    ) -> list[Admission]:
        """Requests for this many slots whose prompts have at most `budget` tokens not yet computed.

        A first prompt is taken even if it is longer than the budget. `find` gives what is known of a prompt.
        """
        taken: list[Admission] = []
        for prompt in list(self._groups):
            if slots == 0:
                break
            computed = self._kept.get(prompt)
            kept = None if computed else find(prompt)
            cost = 0 if computed else len(prompt) - (len(kept) if kept else 0)
            if taken and cost > budget:
                break
            jobs = self._pop(prompt, slots)
            if jobs:
                slots, budget = slots - len(jobs), budget - cost
                taken.append(Admission(prompt, jobs, computed, kept))
        return taken

    def _pop(self, prompt: PromptKey, most: int) -> list[GenerateJob]:
        group, jobs = self._groups[prompt], []
        while group and len(jobs) < most:
            job = group.popleft()
            if not job.abandoned:
                jobs.append(job)
        if not group:
            del self._groups[prompt]
            self._kept.pop(prompt, None)
        return jobs
