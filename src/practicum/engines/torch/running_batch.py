"""The sessions being sampled, and which of them share a running sequence.

Sessions with equal tokens so far are one sequence, in one slot of the KV memory. Each draws its own next
token; where these differ, the sequence splits. Rows are sessions, in the order of their slots.
"""

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
    """Running sessions in rows 0..count-1, and their sequences in slots 0..sequences-1. With `routes`, it
    also stores the experts of the tokens."""

    def __init__(self, slots: int, context: int, device: torch.device, routes: Routes | None = None) -> None:
        self.jobs: list[GenerateJob] = []
        self.draws: Counter[Draw] = Counter()
        """Number of rows by sampling settings."""
        self.sequences = 0
        # One matrix, so that a row moves in one copy. Columns are named below.
        self._state = torch.zeros(slots, 9, dtype=torch.int64, device=device)
        self._stops = torch.full((slots, 1), _NO_TOKEN, dtype=torch.int64, device=device)
        # Sampled tokens stay in place when rows move. `_out` has their row.
        self._tokens = torch.empty(slots, context, dtype=torch.int64, device=device)
        self._logprobs = torch.empty(slots, context, dtype=torch.float32, device=device)
        self._plain = torch.empty(slots, context, dtype=torch.float32, device=device)
        self._top: Tensor | None = None
        self._experts: Tensor | None = None
        if routes is not None:
            small = torch.empty(0, dtype=torch.uint8 if routes.experts <= 256 else torch.int16, device=device)
            self._experts = lazy_zeros((slots, context, routes.layers, routes.per_token), small)
        self._free_outs = list(range(slots))

    def clear(self) -> None:
        self.jobs.clear()
        self.draws.clear()
        self.sequences = 0
        self._free_outs = list(range(len(self._state)))

    @property
    def count(self) -> int:
        return len(self.jobs)

    # Views of the state's columns: the newest token of each row, how many positions of its slot it fills, how
    # many tokens it has sampled and may sample, its randomness, where its samples are, what is added to its
    # length for the position of its newest token (images before it), how many tokens another row's sequence
    # computed, and its slot.
    last_B, length_B, made_B, _limit_B, key_B, _out_B, _shift_B, _shared_B, slot_B = map(_column, range(9))

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the newest token of each sequence, how many positions its slot fills, and its position."""
        slot_B = self.slot_B.contiguous()
        first_S = torch.searchsorted(slot_B, torch.arange(self.sequences, device=slot_B.device))
        length_S = self.length_B[first_S]
        return self.last_B[first_S], length_S, length_S + self._shift_B[first_S]

    def note_decoded(self) -> None:
        """Count the newest token of each sequence as one that its slot holds."""
        self.length_B.add_(1)
        self._shared_B[1:] += self.slot_B[1:] == self.slot_B[:-1]

    def add(self, jobs: Sequence[GenerateJob], prompt: PrefilledPrompt) -> None:
        """Add sessions of one prompt, which share the next slot."""
        first, end = self.count, self.count + len(jobs)
        state = []
        for job in jobs:
            limit, out = job.sampling.max_new_tokens, self._free_outs.pop()
            length, slot = len(job.prompt), self.sequences
            state.append((_NO_TOKEN, length, 0, limit, job.key, out, prompt.shift, 0, slot))
        self._state[first:end] = torch.tensor(state, device=self._state.device)
        width = max(self._stops.shape[1], *(len(job.sampling.stop) for job in jobs))
        self._stops = pad(self._stops, (0, width - self._stops.shape[1]), value=_NO_TOKEN)
        stops = [[*job.sampling.stop] + [_NO_TOKEN] * (width - len(job.sampling.stop)) for job in jobs]
        self._stops[first:end] = torch.tensor(stops, device=self._stops.device)
        for job in jobs:
            job.prompt_experts = prompt.experts
        self.jobs += jobs
        self.sequences += 1
        self.draws.update(job.draw for job in jobs)

    def by_draw(self) -> list[tuple[Draw, list[int]]]:
        """Return the rows by sampling settings."""
        if len(self.draws) == 1:
            return [(next(iter(self.draws)), list(range(self.count)))]
        rows = list(enumerate(self.jobs))
        return [(draw, [row for row, job in rows if job.draw == draw]) for draw in self.draws]

    def note_experts(self, experts_SLE: Tensor) -> None:
        """Store the experts of each sequence's newest token."""
        assert self._experts is not None
        experts_BLE = experts_SLE[self.slot_B].to(self._experts.dtype)
        self._experts[self._out_B, self.made_B - 1] = experts_BLE

    def append(self, sampled: Sampled) -> tuple[list[int], list[Finish]]:
        """Append one token to every row. Return the rows that finish with it, and their finish reasons."""
        place = (self._out_B, self.made_B)
        self._tokens[place] = sampled.tokens_B
        self._logprobs[place] = sampled.logprobs_B.to(torch.float32)
        self._plain[place] = sampled.plain_B.to(torch.float32)
        if width := sampled.top_BK.shape[1]:
            if self._top is None or self._top.shape[2] < width:
                shape = (*self._tokens.shape, width)
                grown = lazy_zeros(shape, torch.empty(0, dtype=torch.int32, device=self._tokens.device))
                if self._top is not None:
                    grown[..., : self._top.shape[2]] = self._top
                self._top = grown
            self._top[(*place, slice(0, width))] = sampled.top_BK.to(torch.int32)
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
        made, shared = self.made_B[index].tolist(), self._shared_B[index].tolist()
        tokens, logprobs, plain = (
            buffer[:, : max(made)][self._out_B[index]].cpu()
            for buffer in (self._tokens, self._logprobs, self._plain)
        )
        reports = [self.jobs[row].sampling.report for row in rows]
        top = None
        if self._top is not None and any(reports):
            top = self._top[:, : max(made)][self._out_B[index]].cpu().to(torch.int64)
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
                topk_ids=top[i, :n, : reports[i]].clone() if top is not None and reports[i] else None,
                shared=shared[i],
            )
            for i, (n, finish) in enumerate(zip(made, finishes, strict=True))
        ]

    def regroup(self, gone: Sequence[int]) -> list[tuple[int, int, int]]:
        """Forget these rows, and split the sequences whose rows have different newest tokens. Return the
        copies to make between slots, (source, target, length). No target is a source."""
        if not gone and self.count == self.sequences:
            return []
        state, leaving = self._state[: self.count].tolist(), set(gone)
        rows_of: dict[tuple[int, int], list[int]] = {}
        for row, (token, *_, slot) in enumerate(state):
            if row not in leaving:
                rows_of.setdefault((slot, token), []).append(row)
        firsts = {slot: (slot, token) for slot, token in reversed(rows_of)}
        # The first part of a split sequence stays, unless fewer slots than that are needed.
        target_of = {part: slot for slot, part in firsts.items() if slot < len(rows_of)}
        free = iter(sorted(set(range(len(rows_of))) - firsts.keys()))
        copies = []
        for part, rows in rows_of.items():
            if part not in target_of:
                target_of[part] = next(free)
                copies.append((part[0], target_of[part], state[rows[0]][1]))
        self._free_outs += [state[row][5] for row in gone]
        self.draws.subtract(self.jobs[row].draw for row in gone)
        self.draws += Counter()
        order = sorted((target_of[part], row) for part, rows in rows_of.items() for row in rows)
        rows = [row for _, row in order]
        self._stops[: len(rows)] = self._stops[rows]
        self._state[: len(rows)] = self._state[rows]
        self.jobs, self.sequences = [self.jobs[row] for row in rows], len(rows_of)
        self.slot_B.copy_(torch.tensor([slot for slot, _ in order], dtype=torch.int64))
        return copies
