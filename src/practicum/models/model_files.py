"""Tokenizers, configs and image processors of model folders and hub names, read once per process and
version of the files."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerBase

KEPT = 64
"""How many of each are remembered."""


def read_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name; OSError or ValueError if there is none."""
    return _tokenizer(source, _stamp(source))


def read_config(source: str) -> Any:
    """The config of a folder or hub name; OSError or ValueError if there is none."""
    return _config(source, _stamp(source))


def read_image_processor(source: str) -> Any:
    """The image processor of a folder or hub name; OSError or ValueError if there is none."""
    return _image_processor(source, _stamp(source))


def _stamp(source: str) -> tuple[int, ...]:
    """Tells versions of a folder apart; nothing for a hub name."""
    folder = Path(source).expanduser()
    return tuple(file.stat().st_mtime_ns for file in sorted(folder.glob("*.json")))


@lru_cache(KEPT)
def _tokenizer(source: str, stamp: tuple[int, ...]) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(source)


@lru_cache(KEPT)
def _config(source: str, stamp: tuple[int, ...]) -> Any:
    return AutoConfig.from_pretrained(source)


@lru_cache(KEPT)
def _image_processor(source: str, stamp: tuple[int, ...]) -> Any:
    return AutoImageProcessor.from_pretrained(source)
