"""The sequences that are being decoded. Row i belongs to slot i of the KV memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from practicum.engines.protocol import Finish, Generation
from practicum.engines.torch.kv_memory import lazy_zeros
from practicum.engines.torch.prompt_cache import PrefilledPrompt
from practicum.engines.torch.request_queue import GenerateJob
from practicum.engines.torch.sampler import Draw, Sampled
from practicum.models.experts import Routes

_NO_TOKEN = -1


def _column(number: int) -> Any:
    return property(lambda rows: rows._state[: rows.count, number])


class RunningBatch:
    """Running sequences in rows 0..count-1. The last row replaces a removed one.

    With `routes`, it also stores the experts of the tokens.
    """

    def __init__(self, slots: int, context: int, device: torch.device, routes: Routes | None = None) -> None:
        self.jobs: list[GenerateJob] = []
        self.draws: Counter[Draw] = Counter()
        """Number of rows by sampling settings."""
        # One matrix, so that a row moves in one copy. Columns are named below.
        self._state = torch.zeros(slots, 7, dtype=torch.int64, device=device)
        self._stops = torch.full((slots, 1), _NO_TOKEN, dtype=torch.int64, device=device)
        # Sampled tokens stay in place when rows move. `_out` has their row.
        self._tokens = torch.empty(slots, context, dtype=torch.int64, device=device)
        self._logprobs = torch.empty(slots, context, dtype=torch.float32, device=device)
        self._plain = torch.empty(slots, context, dtype=torch.float32, device=device)
        self._experts: Tensor | None = None
        if routes is not None:
            small = torch.empty(0, dtype=torch.uint8 if routes.experts <= 256 else torch.int16, device=device)
            self._experts = lazy_zeros((slots, context, routes.layers, routes.per_token), small)
        self._free_outs = list(range(slots))

    def clear(self) -> None:
        self.jobs.clear()
        self.draws.clear()
        self._free_outs = list(range(len(self._state)))

    @property
    def count(self) -> int:
        return len(self.jobs)

    # Views of the state's columns: each row's newest token, filled positions of its slot, numbers of sampled
    # and allowed tokens, randomness, and row of its samples.
    last_B, length_B, made_B, _limit_B, key_B, _out_B = map(_column, range(6))

    @property
    def position_B(self) -> Tensor:
        """Position of each row's newest token, which differs from its length after images."""
        return self._state[: self.count, 1] + self._state[: self.count, 6]

    def add(self, jobs: Sequence[GenerateJob], prompt: PrefilledPrompt) -> None:
        """Append new sequences of a prompt, whose slots hold it."""
        first, end = self.count, self.count + len(jobs)
        state = []
        for job in jobs:
            limit, out = job.sampling.max_new_tokens, self._free_outs.pop()
            state.append((_NO_TOKEN, len(job.prompt), 0, limit, job.key, out, prompt.shift))
        self._state[first:end] = torch.tensor(state, device=self._state.device)
        width = max(self._stops.shape[1], *(len(job.sampling.stop) for job in jobs))
        self._stops = pad(self._stops, (0, width - self._stops.shape[1]), value=_NO_TOKEN)
        stops = [[*job.sampling.stop] + [_NO_TOKEN] * (width - len(job.sampling.stop)) for job in jobs]
        self._stops[first:end] = torch.tensor(stops, device=self._stops.device)
        for job in jobs:
            job.prompt_experts = prompt.experts
        self.jobs += jobs
        self.draws.update(job.draw for job in jobs)

    def by_draw(self) -> list[tuple[Draw, list[int] | slice]]:
        """Return the rows by sampling settings."""
        if len(self.draws) == 1:
            return [(next(iter(self.draws)), slice(None))]
        rows = list(enumerate(self.jobs))
        return [(draw, [row for row, job in rows if job.draw == draw]) for draw in self.draws]

    def note_experts(self, experts_BLE: Tensor) -> None:
        """Store the experts of each row's newest token."""
        assert self._experts is not None
        self._experts[self._out_B, self.made_B - 1] = experts_BLE.to(self._experts.dtype)

    def append(self, sampled: Sampled) -> tuple[list[int], list[Finish]]:
        """Append one token to every row. Return the rows that finish with it, and their finish reasons."""
        place = (self._out_B, self.made_B)
        self._tokens[place] = sampled.tokens_B
        self._logprobs[place] = sampled.logprobs_B.to(torch.float32)
        self._plain[place] = sampled.plain_B.to(torch.float32)
        self.last_B.copy_(sampled.tokens_B)
        self.made_B.add_(1)
        stopped_B = (self._stops[: self.count] == sampled.tokens_B.unsqueeze(1)).any(1)
        finished = (stopped_B | (self.made_B >= self._limit_B)).nonzero().squeeze(1)
        stopped = stopped_B[finished].tolist()
        return finished.tolist(), ["stop" if hit else "length" for hit in stopped]

    def generations(self, rows: Sequence[int], finishes: Sequence[Finish], version: int) -> list[Generation]:
        """Return copies of the samples of these rows on the CPU."""
        if not rows:
            return []
        index = torch.tensor(rows, device=self._state.device)
        made = self.made_B[index].tolist()
        tokens, logprobs, plain = (
            buffer[:, : max(made)][self._out_B[index]].cpu()
            for buffer in (self._tokens, self._logprobs, self._plain)
        )
        experts: list[Tensor | None] = [None] * len(rows)
        if self._experts is not None:  # of prompt tokens, then of sampled ones
            decoded = self._experts[:, : max(made)][self._out_B[index]].cpu().to(torch.int64)
            prompts = [self.jobs[row].prompt_experts for row in rows]
            experts = [
                torch.cat([prompt, decoded[i, : n - 1]])
                for i, (prompt, n) in enumerate(zip(prompts, made, strict=True))
                if prompt is not None
            ]
        return [
            Generation(
                tokens=tokens[i, :n].clone(),
                logprobs=logprobs[i, :n].clone(),
                plain_logprobs=plain[i, :n].clone(),
                finish=finish,
                version_min=version,
                version_max=version,
                experts=experts[i],
            )
            for i, (n, finish) in enumerate(zip(made, finishes, strict=True))
        ]

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """Remove these rows. Return (source, target, length) of the rows that replaced them."""
        gone = set(rows)
        left = self.count - len(gone)
        self._free_outs += self._out_B[list(rows)].tolist() if rows else []
        self.draws.subtract(self.jobs[row].draw for row in rows)
        self.draws += Counter()
        targets = sorted(row for row in gone if row < left)
        sources = [row for row in range(left, self.count) if row not in gone]
        moves = []
        if targets:
            lengths = self.length_B[sources].tolist()
            self._state[targets] = self._state[sources]
            self._stops[targets] = self._stops[sources]
            moves = list(zip(sources, targets, lengths, strict=True))
        for source, target, _ in moves:
            self.jobs[target] = self.jobs[source]
        del self.jobs[left:]
        return moves
