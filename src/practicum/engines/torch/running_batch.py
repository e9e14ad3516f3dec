"""The sequences being decoded: row i of everything here belongs to slot i of the KV memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from practicum.engines.protocol import Finish, Generation
from practicum.engines.torch.kv_memory import lazy_zeros
from practicum.engines.torch.prompt_cache import PrefilledPrompt
from practicum.engines.torch.request_queue import GenerateJob
from practicum.engines.torch.sampler import Draw, Sampled
from practicum.models.experts import Routes

_NO_TOKEN = -1


class RunningBatch:
    """Running sequences, always in rows 0..count-1; a removed row's place is taken by the last one.

    With `routes`, it also keeps which experts the tokens took.
    """

    def __init__(self, slots: int, context: int, device: torch.device, routes: Routes | None = None) -> None:
        self.jobs: list[GenerateJob] = []
        self.draws: Counter[Draw] = Counter()
        """How many rows are sampled in each way."""
        # One matrix, so that a row moves at once; columns are what the properties below say.
        self._state = torch.zeros(slots, 7, dtype=torch.int64, device=device)
        self._stops = torch.full((slots, 1), _NO_TOKEN, dtype=torch.int64, device=device)
        # What was sampled stays where it is when rows move: `_out` says where.
        self._tokens = torch.empty(slots, context, dtype=torch.int64, device=device)
        self._logprobs = torch.empty(slots, context, dtype=torch.float32, device=device)
        self._plain = torch.empty(slots, context, dtype=torch.float32, device=device)
        self._experts: Tensor | None = None
        if routes is not None:
            small = torch.empty(0, dtype=torch.uint8 if routes.experts <= 256 else torch.int16, device=device)
            self._experts = lazy_zeros((slots, context, routes.layers, routes.per_token), small)
        self._free_outs = list(range(slots))

    def clear(self) -> None:
        """Forget all rows."""
        self.jobs.clear()
        self.draws.clear()
        self._free_outs = list(range(len(self._state)))

    @property
    def count(self) -> int:
        return len(self.jobs)

    @property
    def last_B(self) -> Tensor:
        """The newest token of each row."""
        return self._state[: self.count, 0]

    @property
    def length_B(self) -> Tensor:
        """How many positions of its slot each row fills."""
        return self._state[: self.count, 1]

    @property
    def made_B(self) -> Tensor:
        """How many tokens each row has sampled."""
        return self._state[: self.count, 2]

    @property
    def key_B(self) -> Tensor:
        """The randomness of each row."""
        return self._state[: self.count, 4]

    @property
    def position_B(self) -> Tensor:
        """The position of each row's newest token: not its length, if there are pictures before it."""
        return self._state[: self.count, 1] + self._state[: self.count, 6]

    @property
    def _limit_B(self) -> Tensor:
        return self._state[: self.count, 3]

    @property
    def _out_B(self) -> Tensor:
        return self._state[: self.count, 5]

    def add(self, jobs: Sequence[GenerateJob], prompt: PrefilledPrompt) -> None:
        """Put new sequences of one prompt after the running ones; it fills their slots."""
        first, end = self.count, self.count + len(jobs)
        state = [
            (
                _NO_TOKEN,
                len(job.prompt),
                0,
                job.sampling.max_new_tokens,
                job.key,
                self._free_outs.pop(),
                prompt.shift,
            )
            for job in jobs
        ]
        self._state[first:end] = torch.tensor(state, device=self._state.device)
        width = max(self._stops.shape[1], *(len(job.sampling.stop) for job in jobs))
        if width > self._stops.shape[1]:
            more = width - self._stops.shape[1]
            self._stops = torch.nn.functional.pad(self._stops, (0, more), value=_NO_TOKEN)
        stops = [[*job.sampling.stop] + [_NO_TOKEN] * (width - len(job.sampling.stop)) for job in jobs]
        self._stops[first:end] = torch.tensor(stops, device=self._stops.device)
        for job in jobs:
            job.prompt_experts = prompt.experts
        self.jobs += jobs
        self.draws.update(job.draw for job in jobs)

    def note_experts(self, experts_BLE: Tensor) -> None:
        """Keep which experts each row's newest token took."""
        assert self._experts is not None
        self._experts[self._out_B, self.made_B - 1] = experts_BLE.to(self._experts.dtype)

    def append(self, sampled: Sampled) -> tuple[list[int], list[Finish]]:
        """Add one token to every row; the rows that are finished by it, and why."""
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
        """What these rows have sampled, on the CPU, in memory of their own."""
        if not rows:
            return []
        index = torch.tensor(rows, device=self._state.device)
        made = self.made_B[index].tolist()
        tokens, logprobs, plain = (
            buffer[:, : max(made)][self._out_B[index]].cpu()
            for buffer in (self._tokens, self._logprobs, self._plain)
        )
        experts = self._experts_of(rows, index, made)
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

    def _experts_of(self, rows: Sequence[int], index: Tensor, made: Sequence[int]) -> list[Tensor | None]:
        """Experts [P + R - 1, L, E] of these rows, if they are kept: prompt tokens, then sampled ones."""
        if self._experts is None:
            return [None] * len(rows)
        decoded = self._experts[:, : max(made)][self._out_B[index]].cpu().to(torch.int64)
        experts: list[Tensor | None] = []
        for i, (row, n) in enumerate(zip(rows, made, strict=True)):
            prompt = self.jobs[row].prompt_experts
            assert prompt is not None
            experts.append(torch.cat([prompt, decoded[i, : n - 1]]))
        return experts

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """Forget these rows; (source, target, length) of the rows that took their places."""
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
