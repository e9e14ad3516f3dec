"""Texts with {fields} to fill in; {{ and }} are braces."""

from __future__ import annotations

import re
from collections.abc import Mapping

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")


def fields_of(text: str) -> list[str]:
    """Names of the fields in a text, in order; a brace that closes or opens nothing is a ValueError."""
    pieces = list(_PIECE.finditer(text))
    for piece in pieces:
        if piece[0] in ("{", "}"):
            place = text[max(0, piece.start() - 10) : piece.start() + 10]
            raise ValueError(f"a lone {piece[0]!r} at {place!r}; write {piece[0] * 2} for a brace")
    return [piece[1] for piece in pieces if piece[1] is not None]


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with its fields filled in; `values` must have them all."""
    return _PIECE.sub(lambda piece: values[piece[1]] if piece[1] is not None else piece[0][0], text)
