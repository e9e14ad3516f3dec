"""Token sequences as a tree of segments: what sequences have in common at their beginnings is packed once.

A group's prompt, equal beginnings of its responses, the turns of a session and its forks are all such
beginnings. Learner and engine lay out their forward passes by this tree (`packed_attention.py`).
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from practicum.models.packed_attention import Ints, Segments


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Some sequences as they are packed: one after the other, each without what an earlier one has."""

    order: list[int]
    starts: list[int]
    """Where the tokens of each of them begin that it adds, in the order of packing."""
    paths: dict[int, Ints]
    """The packed index of each token, by sequence."""
    segments: Segments


class TokenRows:
    """Token sequences that may begin alike.

    Tokens are equal if their ids are, and if given their rows of `experts`. Sequences share nothing unless
    their `kinds` are equal. Of a beginning that is `fixed`, they share all or nothing.
    """

    def __init__(
        self,
        ids: Sequence[Ints],
        kinds: Sequence[bytes] | None = None,
        fixed: Sequence[int] | None = None,
        experts: Sequence[Ints] | None = None,
    ) -> None:
        self.lengths = list(map(len, ids))
        columns = [x.reshape(-1, 1) for x in ids]
        if experts is not None:
            flat = (x.reshape(len(x), int(np.prod(x.shape[1:]))) for x in experts)
            columns = [np.concatenate(pair, 1) for pair in zip(columns, flat, strict=True)]
        self._items = [np.ascontiguousarray(x).ravel() for x in columns]
        self._width = columns[0].shape[1] if columns else 1
        self._kinds, self._fixed = kinds or [b""] * len(ids), fixed or [0] * len(ids)
        names = [(kind, items.tobytes()) for kind, items in zip(self._kinds, self._items, strict=True)]
        # Sequences that begin alike are neighbours: bytes of equal items are equal.
        self._sorted = sorted(range(len(names)), key=names.__getitem__)
        self.rank = [0] * len(names)
        """The place of each sequence among the sorted ones."""
        for rank, i in enumerate(self._sorted):
            self.rank[i] = rank

    def shared(self, i: int, j: int) -> int:
        """Return with how many tokens in common two sequences begin."""
        if self._kinds[i] != self._kinds[j]:
            return 0
        most = min(len(self._items[i]), len(self._items[j]))
        differ = self._items[i][:most] != self._items[j][:most]
        count = (int(differ.argmax()) if differ.any() else most) // self._width
        return count if count >= max(self._fixed[i], self._fixed[j]) else 0

    def roots(self, rows: Sequence[int], lengths: Sequence[int]) -> dict[int, Hashable]:
        """Return a name for each of these sequences: equal if their prompts begin with the same prompt of one
        of them. Prompts are the first `lengths` tokens of all sequences."""
        names = {i: (self._kinds[i], self._items[i][: lengths[i] * self._width].tobytes()) for i in rows}
        roots: dict[Hashable, Hashable] = {}
        root = None
        for name in sorted(set(names.values())):
            if root is None or name[0] != root[0] or not name[1].startswith(root[1]):
                root = name
            roots[name] = root
        return {i: roots[name] for i, name in names.items()}

    def new_tokens(self, rows: Sequence[int], ranks: list[int]) -> int:
        """Return how many tokens these rows add to those of the given ranks, to which theirs are added."""
        count = 0
        for i in rows:
            at = bisect(ranks, self.rank[i])
            near = (self._sorted[rank] for rank in ranks[max(at - 1, 0) : at + 1])
            count += self.lengths[i] - max((self.shared(i, j) for j in near), default=0)
            insort(ranks, self.rank[i])
        return count

    def tree(self, rows: Sequence[int]) -> TokenTree:
        """Pack these sequences."""
        order = sorted(rows, key=self.rank.__getitem__)
        starts: list[int] = []
        paths: dict[int, Ints] = {}
        parents: list[Ints] = []
        path, total = np.empty(0, dtype=np.int64), 0
        for place, i in enumerate(order):
            start = self.shared(order[place - 1], i) if place else 0
            end = total + self.lengths[i] - start
            parents.append(np.arange(total - 1, end - 1))
            if end > total:
                parents[-1][0] = path[start - 1] if start else -1
            paths[i] = path = np.concatenate([path[:start], np.arange(total, end)])
            starts.append(start)
            total = end
        return TokenTree(order, starts, paths, _segments(np.concatenate(parents)))


def _segments(parent_N: Ints) -> Segments:
    """Cut packed tokens into segments: wherever a token does not follow the one before it, or others do."""
    before_N = np.arange(len(parent_N)) - 1
    children_N = np.bincount(parent_N[parent_N >= 0], minlength=len(parent_N))
    begins_N = (parent_N != before_N) | (children_N[before_N] > 1)
    begins_N[0] = True
    starts, number_N = np.flatnonzero(begins_N), begins_N.cumsum() - 1
    parents = parent_N[starts]
    lengths = np.diff(starts, append=len(parent_N))
    return Segments(starts, lengths, np.where(parents >= 0, number_N[parents], -1))
