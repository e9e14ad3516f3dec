"""Cache of computed prompts, and of finished sequences that later prompts extend, as in an agent's turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate

import torch
from torch import Tensor

from practicum.engines.torch.kv_memory import PromptKv
from practicum.models.vision import Images

BLOCK = 16
"""The beginnings of cached sequences are found at multiples of this many tokens."""


@dataclass(frozen=True, slots=True)
class PromptKey:
    """Key of a prompt: tokens, images and known experts."""

    ids: tuple[int, ...]
    digest: bytes = b""
    images: Images | None = field(default=None, compare=False)
    experts: Tensor | None = field(default=None, compare=False)
    """Experts to replay for the first tokens [n, L, E] (MoE models only)."""

    @staticmethod
    def of(ids: Sequence[int], images: Images | None, experts: Tensor | None = None) -> PromptKey:
        """Create a key from tokens, images and experts."""
        digest = b"" if images is None else images.digest
        if experts is not None:
            digest += blake2b(experts.contiguous().numpy().data.cast("B"), digest_size=16).digest()
        return PromptKey(tuple(ids), digest, images, experts)

    @property
    def pictures(self) -> bytes:
        """Digest of the images."""
        return b"" if self.images is None else self.images.digest

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class PrefilledPrompt:
    """A computed prompt: keys and values, and the last hidden state of its last token."""

    kv: PromptKv
    hidden: Tensor
    shift: int = 0
    """Offset of the next token's position from the number of tokens before it (M-RoPE), or 0 without
    images."""
    experts: Tensor | None = None
    """Experts of its tokens [P, L, E] on the CPU (MoE models only), as a copy."""


@dataclass(eq=False, slots=True)
class CachedSequence:
    """A finished sequence without its last token, which was never an input."""

    ids: tuple[int, ...]
    pictures: bytes
    """Digest of the images."""
    kv: PromptKv
    experts: Tensor | None
    place: int
    """Hash of its tokens."""
    claims: int = 1
    """Number of finished sequences with equal tokens."""
    beginnings: Sequence[int] = ()
    """Hashes of its first tokens, a BLOCK further each."""

    def __len__(self) -> int:
        return len(self.ids)

    def begins(self, prompt: PromptKey) -> bool:
        """Return True if the prompt extends this sequence, with the same images and experts."""
        alike = len(self) < len(prompt) and self.ids == prompt.ids[: len(self)]
        return alike and self.pictures == prompt.pictures and _agree(self.experts, prompt.experts)

    def beginning_of(self, prompt: PromptKey) -> CachedSequence | None:
        """Return the longest common prefix with the prompt, or None if it is less than half of it. States and
        images belong to whole sequences alone."""
        most = min(len(self), len(prompt) - 1)
        differ = (i for i in range(most) if self.ids[i] != prompt.ids[i])
        count = next(differ, most)
        experts = None if self.experts is None else self.experts[:count]
        if 2 * count < len(prompt) or self.kv.states or self.pictures or prompt.pictures:
            return None
        if not _agree(experts, prompt.experts):
            return None
        keys, values = (x[:, :, :count] for x in (self.kv.keys, self.kv.values))
        return CachedSequence(
            self.ids[:count], b"", PromptKv(keys, values, self.kv.layers), experts, self.place
        )


def _agree(cached: Tensor | None, requested: Tensor | None) -> bool:
    """Return True if cached and requested routing agree on the tokens that both cover."""
    if cached is None or requested is None:
        return requested is None
    both = min(len(cached), len(requested))
    return torch.equal(cached[:both], requested[:both])


class SequenceCache:
    """LRU cache of finished sequences with at most `most` tokens in total.

    `sequences` limits their number, because states of short sequences are as large as those of long ones.
    Lookup by a hash of tokens takes time proportional to the prompt's length.
    """

    def __init__(self, most: int, sequences: int | None = None) -> None:
        self.tokens = self.nbytes = 0
        self._most, self._sequences = most, sequences
        # From least to most recently used.
        self._by_hash: dict[int, CachedSequence] = {}
        self._by_beginning: dict[int, CachedSequence] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def clear(self) -> None:
        self._by_hash.clear()
        self._by_beginning.clear()
        self.tokens = self.nbytes = 0

    def put(self, ids: tuple[int, ...], pictures: bytes, kv: PromptKv, experts: Tensor | None) -> None:
        """Store a sequence with a copy of its keys and values, unless it exceeds the cache."""
        if len(ids) > self._most:
            return
        places = _hashes(ids, pictures)
        place = places[-1]
        present = self._by_hash.get(place)
        same = present is not None and present.ids == ids and present.pictures == pictures
        if present is not None and same and _agree(present.experts, experts):
            present.claims += 1
            self._by_hash[place] = self._by_hash.pop(place)
            return
        if present is not None:
            self._forget(present)
        while self.tokens + len(ids) > self._most or len(self._by_hash) == self._sequences:
            self._forget(next(iter(self._by_hash.values())))
        self._by_hash[place] = kept = CachedSequence(ids, pictures, kv.copy(), experts, place)
        kept.beginnings = places[BLOCK - 1 :: BLOCK]
        self._by_beginning |= dict.fromkeys(kept.beginnings, kept)
        self.tokens += len(ids)
        self.nbytes += kept.kv.nbytes

    def find(self, prompt: PromptKey) -> CachedSequence | None:
        """Return the longest cached sequence that the prompt extends by at least one token. It may be the
        beginning of one, if that is at least half of the prompt."""
        if not self._by_hash:
            return None
        places = _hashes(prompt.ids, prompt.pictures)
        for count in range(len(places) - 1, 0, -1):
            kept = self._by_hash.get(places[count - 1])
            if kept is not None and kept.begins(prompt):
                return kept
            if count % BLOCK == 0 and 2 * (count + BLOCK) > len(prompt):
                kept = self._by_beginning.get(places[count - 1])
                if kept is not None and (beginning := kept.beginning_of(prompt)) is not None:
                    return beginning
        return None

    def use(self, kept: CachedSequence, times: int) -> None:
        """Record that `times` sequences extended this entry. It is removed after all its sequences were
        extended. An entry of which only the beginning was used stays, for its own next turn.
        """
        if self._by_hash.get(kept.place) is not kept:
            return
        kept.claims -= times
        if kept.claims <= 0:
            self._forget(kept)
        else:
            self._by_hash[kept.place] = self._by_hash.pop(kept.place)

    def _forget(self, kept: CachedSequence) -> None:
        del self._by_hash[kept.place]
        for place in kept.beginnings:
            if self._by_beginning.get(place) is kept:
                del self._by_beginning[place]
        self.tokens -= len(kept)
        self.nbytes -= kept.kv.nbytes


def _hashes(ids: Sequence[int], pictures: bytes) -> list[int]:
    """Return hashes of the first 1, 2, ... tokens together with the pictures."""
    return list(accumulate(ids, lambda so_far, i: hash((so_far, i)), initial=hash(pictures)))[1:]
