"""A store that records what goes through it: the one place where all stages' columns pass, in any runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Column
from practicum.dataplane.store import Store
from practicum.dataplane.store_files import read_batches
from practicum.records.recorder import Recorder, told_tags

_JUDGED = ("status", "reward", "reward_parts", "failure")
"""Tags that change after the rollout."""


class RecordingStore:
    """A Store that forwards to another and gives recorded rows to a recorder."""

    def __init__(self, store: Store, recorder: Recorder) -> None:
        self.inner, self.recorder = store, recorder
        self.batch, self.clear, self.size, self.save = store.batch, store.clear, store.size, store.save

    def put(self, batch: BatchRef, columns: Mapping[str, Column], *, keep_tags: bool = False) -> None:
        self.inner.put(batch, columns, keep_tags=keep_tags)
        writer = FIELDS[next(iter(columns))].writer if columns else "rollout"
        self.recorder.count(writer, columns, read=False)
        if any(tags.recorded for tags in batch.tags):
            kept = {n: c for n, c in columns.items() if self._keeps(n)}
            self.recorder.add(self.recorder.stage(writer), batch, kept, None if keep_tags else told_tags)

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        columns = self.inner.get(batch, fields)
        self.recorder.count("", columns, read=True)
        return columns

    def tag(self, partition: str, tags: Mapping[Key, Tags]) -> None:
        self.inner.tag(partition, tags)
        batch = BatchRef(partition, tuple(tags), tuple(tags.values()))
        self.recorder.add("reward", batch, {}, lambda one: {name: getattr(one, name) for name in _JUDGED})

    def load(self, path: Path) -> None:
        """Rows of later steps may have been written to the record after the point that it is cut back to."""
        self.inner.load(path)
        for batch, columns in read_batches(path):
            writers = {FIELDS[name].writer for name in columns}
            for writer in sorted(writers):
                written = {n: c for n, c in columns.items() if FIELDS[n].writer == writer and self._keeps(n)}
                self.recorder.add(writer, batch, written, told_tags)

    def _keeps(self, name: str) -> bool:
        return FIELDS[name].extent != "object" or self.recorder.place.everything


def recorder_of(store: Store) -> Recorder | None:
    """Who records what goes through a store, if anybody does."""
    return store.recorder if isinstance(store, RecordingStore) else None


def stage_span(
    store: Store, stage: str, step: int, part: str = "", rows: int = 0
) -> AbstractContextManager[None]:
    """A stage, or a part of it such as one teacher, runs in this process inside."""
    recorder = recorder_of(store)
    return nullcontext() if recorder is None else recorder.span(stage, step, part, rows)


def record_more(store: Store, stage: str, batch: BatchRef, columns: Mapping[str, Any], **more: Any) -> None:
    """Record columns that are no fields: lists with a value for each row, or as fields have them."""
    recorder = recorder_of(store)
    if recorder is not None:
        recorder.add(stage, batch, columns, **more)
