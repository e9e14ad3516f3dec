"""Check text values: names, devices, addresses, and templates with {fields}."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from practicum.devices import FORMS as DEVICE_FORMS
from practicum.devices import is_device_name
from practicum.errors import RecipeError

_WORD = re.compile(r"[A-Za-z0-9_-]+")
_URL = re.compile(r"https?://[^\s/]\S*")
_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}|[{}]")


def check_names(path: str, what: str, names: Iterable[str]) -> Iterator[RecipeError]:
    """Yield names that can't be part of a metric's name."""
    for name in names:
        if not _WORD.fullmatch(name):
            expected = "letters, digits, '_' and '-'"
            yield RecipeError(path, f"a {what} named {name!r}", expected, "metrics contain this name")


def check_device(path: str, device: str) -> Iterator[RecipeError]:
    """Yield a problem if torch has no such device."""
    if not is_device_name(device):
        yield RecipeError(f"{path}.device", repr(device), DEVICE_FORMS)


def check_url(path: str, url: str | None) -> Iterator[RecipeError]:
    """Yield a problem if a server's address is malformed."""
    if url is not None and not _URL.fullmatch(url):
        yield RecipeError(f"{path}.url", repr(url), "http://… or https://…, such as http://127.0.0.1:8000/v1")


def fields_of(text: str) -> list[str]:
    """Return the names of the {fields} in a text. {{ and }} are braces. A lone brace is a ValueError."""
    pieces = list(_PIECE.finditer(text))
    for piece in pieces:
        if piece[0] in ("{", "}"):
            place = text[max(0, piece.start() - 10) : piece.start() + 10]
            raise ValueError(f"a lone {piece[0]!r} at {place!r}; write {piece[0] * 2} for a brace")
    return [piece[1] for piece in pieces if piece[1] is not None]


def fill(text: str, values: Mapping[str, str]) -> str:
    """Fill in the fields of a text. `values` must have all of them."""
    return _PIECE.sub(lambda piece: values[piece[1]] if piece[1] is not None else piece[0][0], text)
