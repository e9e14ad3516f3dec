"""Tokenizers, configs and image processors of model folders and hub names, read once per process and
version of the files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from practicum.errors import RecipeError
from practicum.models.hub import is_unreachable, not_found

KEPT = 192
"""How many are remembered."""


@contextmanager
def must_read(source: str, key: str, expected: str) -> Iterator[None]:
    """A RecipeError about `key` if the block can't read `source`."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, OSError) and is_unreachable(source):
            raise not_found(key, source, "model") from None
        raise RecipeError(key, source, expected, str(error).splitlines()[0]) from error


def read_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name; OSError or ValueError if there is none."""
    return _read(AutoTokenizer, source, _stamp(source))


def read_config(source: str) -> Any:
    """The config of a folder or hub name; OSError or ValueError if there is none."""
    return _read(AutoConfig, source, _stamp(source))


def read_image_processor(source: str) -> Any:
    """The image processor of a folder or hub name; OSError or ValueError if there is none."""
    return _read(AutoImageProcessor, source, _stamp(source))


def read_generation(source: str) -> Any:
    """The generation config of a folder or hub name; of a model without one, its config."""
    return _generation(source, _stamp(source))


def _stamp(source: str) -> tuple[int, ...]:
    """Tells versions of a folder apart; nothing for a hub name, which is not waited for without a network."""
    is_unreachable(source)
    folder = Path(source).expanduser()
    return tuple(file.stat().st_mtime_ns for file in sorted(folder.glob("*.json")))


@lru_cache(KEPT)
def _read(reader: Any, source: str, stamp: tuple[int, ...]) -> Any:
    return reader.from_pretrained(source)


@lru_cache(KEPT)
def _generation(source: str, stamp: tuple[int, ...]) -> Any:
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:
        return _read(AutoConfig, source, stamp).get_text_config()
