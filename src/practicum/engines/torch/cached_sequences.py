"""What was computed of finished sequences, kept for prompts that go on from them: an agent's later turns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from practicum.engines.torch.kv_memory import PromptKv
from practicum.engines.torch.request_queue import CachedSequence, PromptKey


class CachedSequences:
    """Finished sequences of at most `most` tokens in all; those that nobody asked for longest go first.

    They are found by a hash of their tokens, in time that depends on the prompt's length alone.
    """

    def __init__(self, most: int) -> None:
        self.tokens = self.nbytes = 0
        self._most = most
        # From those put in or used longest ago to the newest.
        self._by_hash: dict[int, CachedSequence] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def clear(self) -> None:
        """Forget everything."""
        self._by_hash.clear()
        self.tokens = self.nbytes = 0

    def put(self, ids: tuple[int, ...], pictures: bytes, kv: PromptKv, experts: Tensor | None) -> None:
        """Keep a sequence, its keys and values in memory of its own, unless it is longer than all may be."""
        if len(ids) > self._most:
            return
        place = _hashes(ids, pictures)[-1]
        known = self._by_hash.get(place)
        if known is not None and known.is_of(ids, pictures, experts):
            known.claims += 1
            self._by_hash[place] = self._by_hash.pop(place)
            return
        if known is not None:
            self._forget(known)
        while self.tokens + len(ids) > self._most:
            self._forget(next(iter(self._by_hash.values())))
        self._by_hash[place] = kept = CachedSequence(ids, pictures, kv.copy(), experts, place)
        self.tokens += len(ids)
        self.nbytes += kept.kv.nbytes

    def find(self, prompt: PromptKey) -> CachedSequence | None:
        """The longest kept sequence that the prompt goes on from with at least one token."""
        if not self._by_hash:
            return None
        for place in reversed(_hashes(prompt.ids, prompt.pictures)[:-1]):
            kept = self._by_hash.get(place)
            if kept is not None and kept.begins(prompt):
                return kept
        return None

    def use(self, kept: CachedSequence, times: int) -> None:
        """It was gone on from by so many sequences: once all that it stands for have done so, it goes."""
        if self._by_hash.get(kept.place) is not kept:
            return
        kept.claims -= times
        if kept.claims <= 0:
            self._forget(kept)
        else:
            self._by_hash[kept.place] = self._by_hash.pop(kept.place)

    def _forget(self, kept: CachedSequence) -> None:
        del self._by_hash[kept.place]
        self.tokens -= len(kept)
        self.nbytes -= kept.kv.nbytes


def _hashes(ids: Sequence[int], pictures: bytes) -> list[int]:
    """Hashes of the first 1, 2, ... tokens together with the pictures."""
    return list(accumulate(ids, lambda so_far, i: hash((so_far, i)), initial=hash(pictures)))[1:]
