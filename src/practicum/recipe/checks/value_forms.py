"""Values that are text of a certain form: names, devices, addresses, and templates with {fields}."""

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
    """Names that metrics are called by."""
    for name in names:
        if not _WORD.fullmatch(name):
            expected = "letters, digits, '_' and '-'"
            yield RecipeError(path, f"a {what} named {name!r}", expected, "it names metrics")


def check_device(path: str, device: str) -> Iterator[RecipeError]:
    """A device that torch could have."""
    if not is_device_name(device):
        yield RecipeError(f"{path}.device", repr(device), DEVICE_FORMS)


def check_url(path: str, url: str | None) -> Iterator[RecipeError]:
    """An address of a server, if there is one."""
    if url is not None and not _URL.fullmatch(url):
        yield RecipeError(f"{path}.url", repr(url), "http://… or https://…, such as http://127.0.0.1:8000/v1")


def fields_of(text: str) -> list[str]:
    """Names of the {fields} in a text, in order; {{ and }} are braces, and a lone brace is a ValueError."""
    pieces = list(_PIECE.finditer(text))
    for piece in pieces:
        if piece[0] in ("{", "}"):
            place = text[max(0, piece.start() - 10) : piece.start() + 10]
            raise ValueError(f"a lone {piece[0]!r} at {place!r}; write {piece[0] * 2} for a brace")
    return [piece[1] for piece in pieces if piece[1] is not None]


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with its fields filled in; `values` must have them all."""
    return _PIECE.sub(lambda piece: values[piece[1]] if piece[1] is not None else piece[0][0], text)
