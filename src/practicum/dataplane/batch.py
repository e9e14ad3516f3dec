"""The controller's view of a batch: keys and tags without tensors, and its groups and sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.wire import Rows, pack_columns, unpack_columns
from practicum.errors import StoreError

_plain_tags = attrgetter(*(field.name for field in fields(Tags)))
"""The values of a Tags in the order of its fields."""
_KEY_FIELDS = len(Key._fields)


@dataclass(frozen=True, slots=True)
class BatchRef:
    """Rows of one partition, in order, with their tags. Keys are distinct."""

    partition: str
    keys: tuple[Key, ...]
    tags: tuple[Tags, ...]

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise StoreError(f"a batch of {len(self.keys)} keys came with {len(self.tags)} tags")
        if len(set(self.keys)) < len(self.keys):
            twice = next(key for key, times in Counter(self.keys).items() if times > 1)
            raise StoreError(f"{twice} is in the batch more than once")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.partition, pack_columns([(*key, *_plain_tags(tags)) for key, tags in self]))

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[Key, Tags]]:
        return zip(self.keys, self.tags, strict=True)

    def take(self, indices: Sequence[int]) -> BatchRef:
        """Return those rows in that order, each at most once."""
        for i in indices:
            if not 0 <= i < len(self):
                raise StoreError(f"row {i} of a batch of {len(self)} rows does not exist")
        keys = tuple(self.keys[i] for i in indices)
        return BatchRef(self.partition, keys, tuple(self.tags[i] for i in indices))

    def where(self, wanted: Callable[[Key, Tags], bool]) -> BatchRef:
        return self.take([i for i, (key, tags) in enumerate(self) if wanted(key, tags)])

    def real(self) -> BatchRef:
        return self.where(lambda _, tags: not tags.is_padding) if self.has_padding else self

    @property
    def has_padding(self) -> bool:
        return any(tags.is_padding for tags in self.tags)

    @staticmethod
    def concat(batches: Sequence[BatchRef]) -> BatchRef:
        """Concatenate batches of one partition. Raise StoreError for duplicate rows."""
        partitions = {batch.partition for batch in batches}
        if not partitions:
            raise StoreError("concat needs at least one batch")
        if len(partitions) > 1:
            raise StoreError(f"can't join batches of partitions {sorted(partitions)}")
        keys = tuple(key for batch in batches for key in batch.keys)
        return BatchRef(partitions.pop(), keys, tuple(tag for batch in batches for tag in batch.tags))


def plain_keys(keys: Sequence[Key]) -> Rows:
    """Return keys as plain tuples, for other processes."""
    return Rows(map(tuple, keys))


def plain_tags(tags: Iterable[Tags]) -> Rows:
    """Return tags as plain tuples, for other processes."""
    return Rows(map(_plain_tags, tags))


def _rebuilt(partition: str, packed: bytes) -> BatchRef:
    columns = unpack_columns(packed)
    keys = map(Key._make, zip(*columns[:_KEY_FIELDS], strict=True))
    return BatchRef(partition, tuple(keys), tuple(map(Tags, *columns[_KEY_FIELDS:])) if columns else ())


@dataclass(frozen=True, slots=True)
class Group:
    """All finished sessions of a prompt, including failed ones."""

    prompt: int
    rows: tuple[tuple[Key, Tags], ...]

    def rewards(self) -> list[float]:
        """Return the reward of each session that has one, without the baseline's."""
        by_session = {
            key.session: tags.reward
            for key, tags in self.rows
            if tags.status == "ready" and not tags.is_baseline
        }
        return [reward for reward in by_session.values() if reward is not None]

    @property
    def has_failed(self) -> bool:
        return any(tags.status == "failed" for _, tags in self.rows)

    @property
    def is_flat(self) -> bool:
        """True if all sessions have equal rewards, so that a relative estimator has no gradient."""
        return len(set(self.rewards())) < 2


def groups_of(batch: BatchRef) -> list[Group]:
    """Group the rows of a batch by prompt, in order of first appearance."""
    by_prompt: dict[int, list[tuple[Key, Tags]]] = {}
    for key, tags in batch:
        by_prompt.setdefault(key.prompt, []).append((key, tags))
    return [Group(prompt, tuple(rows)) for prompt, rows in by_prompt.items()]


_SUMMED = ("response_tokens", "sampled_tokens", "turns", "tool_calls", "tool_errors", "breaks")


def session_tags(batch: BatchRef) -> list[Tags]:
    """Return a Tags per session: its last trajectory's, with the tokens of all. No baselines, no padding."""
    tags_of_session: dict[tuple[int, ...], Tags] = {}
    for key, last in batch:
        if last.is_baseline or last.is_padding:
            continue
        if (before := tags_of_session.get(key[:2])) is not None:
            sums = {name: getattr(before, name) + getattr(last, name) for name in _SUMMED}
            last = replace(last, **sums)
        tags_of_session[key[:2]] = last
    return list(tags_of_session.values())
