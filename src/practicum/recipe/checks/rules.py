"""What the checks of a recipe share: rules for names, and options that nothing would read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from practicum.errors import RecipeError
from practicum.recipe.schema.section import Section
from practicum.recipe.text import yamlfile
from practicum.recipe.text.problems import shorten

_WORD = re.compile(r"[A-Za-z0-9_-]+")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_URL = re.compile(r"https?://[^\s/]\S*")


def default_of(section: type[Section], key: str) -> Any:
    """The default of a section's key."""
    return section.model_fields[key].get_default(call_default_factory=True, validated_data={})


def show(value: Any) -> str:
    """A value as a recipe writes it, cut to fit on a line."""
    if isinstance(value, list) and all(isinstance(item, BaseModel) for item in value):
        return yamlfile.dump([item.model_dump(exclude_defaults=True) for item in value], flow=True)
    return yamlfile.dump(value.model_dump(), flow=True) if isinstance(value, BaseModel) else shorten(value)


def unread(section: Section, path: str, keys: Iterable[str], why: str, advice: str) -> Iterator[RecipeError]:
    """A problem for each of the keys that is set (to another value than its default), though unread."""
    for key in keys:
        value, default = getattr(section, key), default_of(type(section), key)
        if value != default:
            expected = f"{show(default)} (nothing would read another value)"
            yield RecipeError(f"{path}.{key}", f"{show(value)} {why}", expected, advice)


def check_names(path: str, what: str, names: Iterable[str]) -> Iterator[RecipeError]:
    """Names that metrics are called by."""
    for name in names:
        if not _WORD.fullmatch(name):
            expected = "letters, digits, '_' and '-'"
            yield RecipeError(path, f"a {what} named {name!r}", expected, "it names metrics")


def check_device(path: str, device: str) -> Iterator[RecipeError]:
    """A device that torch could have."""
    if not _DEVICE.fullmatch(device):
        yield RecipeError(f"{path}.device", repr(device), "auto, cpu, cuda or cuda:N")


def check_url(path: str, url: str | None) -> Iterator[RecipeError]:
    """An address of a server, if there is one."""
    if url is not None and not _URL.fullmatch(url):
        yield RecipeError(f"{path}.url", repr(url), "http://… or https://…, such as http://127.0.0.1:8000/v1")
