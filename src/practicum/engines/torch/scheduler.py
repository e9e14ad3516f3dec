"""Continuous batching: decide which requests to compute. The torch engine runs `Scheduler.step`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from practicum.engines.protocol import Generation
from practicum.engines.torch.confirm import confirm
from practicum.engines.torch.engine_thread import Job, Outcome
from practicum.engines.torch.kv_memory import KvMemory
from practicum.engines.torch.model_runner import ModelRunner, decode, extend, prefill, sample_hidden
from practicum.engines.torch.prompt_cache import CachedSequence, PrefilledPrompt, SequenceCache
from practicum.engines.torch.request_queue import Admission, GenerateJob, RequestQueue, ScoreJob
from practicum.engines.torch.running_batch import RunningBatch
from practicum.engines.torch.sampler import Sampled, uniforms
from practicum.engines.torch.score_batch import Prefix, score_batch
from practicum.errors import EngineError


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine's creation. Prefilled tokens were computed, reused ones came from the cache.
    Shared tokens are inputs of decoding that a sequence computed for more than one session."""

    prefilled_prompts: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    shared_tokens: int = 0
    sampled_tokens: int = 0
    scored_tokens: int = 0
    confirmed_turns: int = 0
    redrafted_turns: int = 0
    most_rows: int = 0


class Scheduler:
    """Sequences in slots, and requests that wait for them. Not thread-safe."""

    def __init__(
        self, runner: ModelRunner, slots: int, context: int, prefill_tokens: int, score_tokens: int
    ) -> None:
        self.version = 0
        self.stats = EngineStats()
        self.alone = not runner.invariant
        """True if turns are confirmed and sequences scored one by one, see `confirm.py`."""
        self.running = RunningBatch(slots, context, runner.device, runner.routes)
        self.waiting = RequestQueue()
        self.cache = SequenceCache(slots * context, slots if runner.seam.states else None)
        self.scoring: deque[ScoreJob] = deque()
        self._drafts: list[tuple[GenerateJob, Generation]] = []
        self._runner, self._slots, self._context = runner, slots, context
        self._prefill_tokens, self._score_tokens = prefill_tokens, score_tokens
        self.memory: KvMemory | None = None
        """KV memory, or None while the engine sleeps."""
        self.allocate()

    def allocate(self) -> None:
        """Allocate KV memory unless it exists."""
        if self.memory is None:
            self.memory = KvMemory(self._runner.token_kv, self._slots, self._context)

    @property
    def kv_bytes(self) -> int:
        return (self.memory.nbytes if self.memory else 0) + self.cache.nbytes

    @property
    def busy(self) -> bool:
        return bool(self.running.count or self.waiting or self.scoring or self._drafts)

    def free(self) -> None:
        """Discard all requests and free the KV memory."""
        self.reset()
        self.memory = None

    def reset(self) -> None:
        """Discard all requests and their results."""
        for part in (self.running, self.waiting, self.cache, self.scoring, self._drafts):
            part.clear()

    @torch.no_grad()
    def step(self, arrived: list[Job]) -> tuple[list[Outcome], bool]:
        """Add new requests and run one step. Return outcomes, and True if work remains."""
        if self.memory is None:
            raise EngineError("the engine sleeps: call wake() first")
        for job in arrived:
            if isinstance(job, GenerateJob):
                self.waiting.add(job)
            elif isinstance(job, ScoreJob):
                self.scoring.append(job)
        self._regroup(self.memory, [row for row, job in enumerate(self.running.jobs) if job.abandoned])
        outcomes = self._score() + self._confirm()
        hidden = [*self._decode(self.memory), *self._admit(self.memory)]
        if hidden:
            rows, hidden_S, parts, order = self.running, torch.cat(hidden), [], []
            uniform_B = uniforms(rows.key_B, rows.made_B)
            for draw, alike in rows.by_draw():
                slots, row_B = rows.slot_B[alike].unique_consecutive(return_inverse=True)
                parts.append(sample_hidden(self._runner, hidden_S[slots], draw, uniform_B[alike], row_B))
                order += alike
            most = max(part.top_BK.shape[1] for part in parts)
            parts = [x._replace(top_BK=pad(x.top_BK, (0, most - x.top_BK.shape[1]))) for x in parts]
            back_B = torch.tensor(order, device=hidden_S.device).argsort()  # restores the order of the rows
            sampled = Sampled(*(torch.cat(column)[back_B] for column in zip(*parts, strict=True)))
            self.stats.sampled_tokens += rows.count
            outcomes += self._collect(self.memory, sampled)
        return outcomes, self.busy

    def _decode(self, memory: KvMemory) -> list[Tensor]:
        """Return hidden states of the newest token of each running sequence."""
        rows = self.running
        if not rows.count:
            return []
        token_S, length_S, position_S = rows.inputs()
        # Each session may need a slot of its own after this token.
        memory.reserve(rows.count, int(length_S.max()) + 1)
        hidden_S, experts_S = decode(self._runner, memory, token_S, length_S, position_S)
        if experts_S is not None:
            rows.note_experts(experts_S)
        rows.note_decoded()
        self.stats.decode_steps += 1
        self.stats.decoded_tokens += rows.sequences
        self.stats.shared_tokens += rows.count - rows.sequences
        return [hidden_S]

    def _admit(self, memory: KvMemory) -> list[Tensor]:
        """Assign free slots to waiting requests. Return hidden states of their prompts' last tokens."""
        taken = self.waiting.take(self._slots - self.running.count, self._prefill_tokens, self.cache.find)
        if taken:
            count = self.running.count + sum(len(one.jobs) for one in taken)
            longest = memory.longest if self.running.count else 0
            memory.reserve(count, max(longest, *(len(one.prompt) for one in taken)))
        new = [one.prompt for one in taken if one.computed is None and one.kept is None]
        computed = iter(prefill(self._runner, new) if new else [])
        self.stats.prefilled_prompts += len(new)
        self.stats.prefilled_tokens += sum(map(len, new))
        fresh: list[Tensor] = []
        for one in taken:
            if one.kept is None:
                prompt = one.computed or next(computed)
                memory.put_prompt(prompt.kv, self.running.sequences, 1)
                fresh.append(self._start(one, prompt))
        # Sorted by length, so that adjacent rows need little padding.
        begun = sorted((one for one in taken if one.kept), key=lambda one: len(one.prompt))
        fresh += self._extend(memory, begun) if begun else []
        self.stats.most_rows = max(self.stats.most_rows, self.running.count)
        return fresh

    def _extend(self, memory: KvMemory, admissions: Sequence[Admission]) -> list[Tensor]:
        """Admit prompts that begin with a cached sequence."""
        begun: list[tuple[int, CachedSequence]] = []
        for slot, one in enumerate(admissions, self.running.sequences):
            assert one.kept is not None
            memory.put_prompt(one.kept.kv, slot, 1)
            self.cache.use(one.kept, len(one.jobs))
            begun.append((slot, one.kept))
        prompts = [one.prompt for one in admissions]
        computed = extend(self._runner, memory, prompts, begun)
        reused = sum(len(kept) for _, kept in begun)
        self.stats.prefilled_prompts += len(prompts)
        self.stats.prefilled_tokens += sum(map(len, prompts)) - reused
        self.stats.reused_tokens += reused
        pairs = zip(admissions, computed, strict=True)
        return [self._start(one, prompt) for one, prompt in pairs]

    def _start(self, admission: Admission, prompt: PrefilledPrompt) -> Tensor:
        """Begin the sequence of a prompt that the next slot holds, for all of its requests."""
        self.waiting.keep(admission.prompt, prompt)
        self.running.add(admission.jobs, prompt)
        return prompt.hidden.unsqueeze(0)

    def _collect(self, memory: KvMemory, sampled: Sampled) -> list[Outcome]:
        """Add a token to each session. Finished ones leave, and sequences split whose tokens differ."""
        done, finishes = self.running.append(sampled)
        jobs, slots = [self.running.jobs[row] for row in done], self.running.slot_B[done].tolist()
        made = list(zip(jobs, self.running.generations(done, finishes, self.version), strict=True))
        for slot, (job, generation) in zip(slots, made, strict=True):
            if job.keep:  # the last token was never an input and has no cache
                ids = (*job.prompt.ids, *generation.tokens[:-1].tolist())
                self.cache.put(ids, job.prompt.pictures, memory.prompt(slot, len(ids)), generation.experts)
        self._regroup(memory, done)
        if self.alone:
            self._drafts += made
            return []
        return [*made]

    def _confirm(self) -> list[Outcome]:
        """Recompute drafted turns one by one. Rejected ones return to the queue."""
        drafts, self._drafts = self._drafts, []
        outcomes: list[Outcome] = []
        for job, draft in drafts:
            if job.abandoned:
                continue
            made = confirm(self._runner, job, draft)
            if made is None:
                self.stats.redrafted_turns += 1
                self.waiting.add(job)
            else:
                self.stats.confirmed_turns += 1
                outcomes.append((job, made))
        return outcomes

    def _regroup(self, memory: KvMemory, gone: list[int]) -> None:
        for source, target, length in self.running.regroup(gone):
            memory.move(source, target, length, split=source < self.running.sequences)

    def _score(self) -> list[Outcome]:
        """Score the requests of one forward pass."""
        jobs: list[ScoreJob] = []
        seen: set[Prefix] = set()
        tokens = 0
        while self.scoring:
            job = self.scoring[0]
            if not job.abandoned:
                prefix = job.adapter, job.prefix  # computed once for all jobs with this prefix
                tokens += len(job.targets) - 1 + (0 if prefix in seen else len(job.prefix))
                seen.add(prefix)
                if jobs and tokens > self._score_tokens:
                    break
                jobs.append(job)
            self.scoring.popleft()
        if not jobs:
            return []
        self.stats.scored_tokens += sum(len(job.targets) for job in jobs)
        batches = [[job] for job in jobs] if self.alone else [jobs]
        scores = [one for batch in batches for one in score_batch(self._runner, batch, self.version)]
        return list(zip(jobs, scores, strict=True))
