"""Rows as text: what the model read, and what it and others wrote after that."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from practicum.dataplane.batch import BatchRef
from practicum.dataplane.ragged import Columns
from practicum.dataplane.store import Store


@dataclass(frozen=True, slots=True)
class TranscriptSpan:
    """Consecutive tokens of a response that the student sampled, or that a tool or a template gave."""

    sampled: bool
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Transcript:
    """A row as text, special tokens included; all empty for a failed session that left no tokens."""

    prompt: str = ""
    response: str = ""
    spans: tuple[TranscriptSpan, ...] = ()
    """The response, cut where sampled and given tokens meet."""


def read_transcripts(store: Store, tokenizer: PreTrainedTokenizerBase, batch: BatchRef) -> list[Transcript]:
    """The rows of a batch as text, in its order."""
    written = batch.where(lambda _, tags: tags.prompt_tokens > 0)
    if not written:
        return [Transcript()] * len(batch)
    names = ("prompt_ids", "response_ids", "response_mask")
    columns = Columns("transcripts", store.get(written, names))
    rows = zip(*(columns.ragged(name).rows for name in names), strict=True)
    transcripts = {}
    for key, (prompt, response, mask) in zip(written.keys, rows, strict=True):
        spans, at = [], 0
        for sampled, run in groupby(mask.tolist()):
            end = at + len(list(run))
            spans.append(TranscriptSpan(sampled, str(tokenizer.decode(response[at:end])), end - at))
            at = end
        before, after = (str(tokenizer.decode(ids)) for ids in (prompt, response))
        transcripts[key] = Transcript(before, after, tuple(spans))
    return [transcripts.get(key, Transcript()) for key in batch.keys]
