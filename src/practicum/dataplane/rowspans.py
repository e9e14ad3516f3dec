"""Rows of a store in words and numbers: which tokens they have, and which of them lack. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from practicum.dataplane.fields import FIELDS
from practicum.dataplane.keys import Key
from practicum.errors import StoreError

_SHOWN = 3
"""Rows that an error names."""


def name_keys(keys: Sequence[Key]) -> str:
    """The first few keys, and how many more there are."""
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(str(key) for key in keys[:_SHOWN]) + more


def merged_spans(
    key: Key,
    held: Mapping[str, int],
    fields: Iterable[str],
    put: Mapping[str, int],
    new: set[str],
) -> dict[str, int]:
    """Tokens of a row that holds `fields` once the columns `new` are put; uneven is a StoreError.

    A length may change only if every column of that extent changes with it.
    """
    for extent, tokens in put.items():
        if held.get(extent, tokens) == tokens:
            continue
        for name in fields:
            if name not in new and FIELDS[name].extent == extent:
                wrong = next(other for other in new if FIELDS[other].extent == extent)
                raise StoreError(
                    f"{wrong} of {key} has {tokens} tokens, but its {name}, which is held already, "
                    f"has {held[extent]}"
                )
    merged = {**held, **put}
    if len(merged) == 3 and merged["prompt"] + merged["response"] != merged["sequence"]:
        whole = next(name for name in (*new, *fields) if FIELDS[name].extent == "sequence")
        raise StoreError(
            f"{whole} of {key} has {merged['sequence']} tokens, but the row has "
            f"{merged['prompt']} prompt + {merged['response']} response tokens"
        )
    return merged


def describe_lacking(lacking: Mapping[Any, list[str] | None]) -> str:
    """The first few rows that did not come, and what each lacks; None: it was never put."""
    parts = [
        f"{Key(*key)} " + ("was never put" if absent is None else f"lacks {', '.join(absent)}")
        for key, absent in list(lacking.items())[:_SHOWN]
    ]
    if len(lacking) > len(parts):
        parts.append(f"and {len(lacking) - len(parts)} more")
    return "; ".join(parts)
