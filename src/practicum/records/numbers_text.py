"""Tensors as JSON: every float is the shortest text that reads back to the same bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from practicum.dataplane.ragged import Column, Ragged

_SPECIAL = {"nan": "null", "inf": "1e999", "-inf": "-1e999"}


def column_texts(column: Column, places: Sequence[int]) -> list[str]:
    """The values of these rows of a column; its numbers become text all at once, which is quicker."""
    if isinstance(column, list):
        return [plain_text(column[i]) for i in places]
    if not isinstance(column, Ragged):
        return _texts(column[list(places)], ())
    chosen = column.select(places)
    texts, rows, at = _texts(chosen.values, chosen.trailing), [], 0
    for length in chosen.lengths:
        rows.append(_list(texts[at : at + length]))
        at += length
    return rows


def plain_text(value: Any) -> str:
    """JSON of a plain value; a tensor in it comes with its type."""
    return json.dumps(_plain(value), ensure_ascii=False)


def _texts(values: Tensor, trailing: Sequence[int]) -> list[str]:
    """A text for each place of the first axis."""
    values = values.detach().cpu()
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    texts = _number_texts(values.reshape(-1).numpy())
    for width in reversed(trailing):
        texts = [_list(texts[i : i + width]) for i in range(0, len(texts), width)] if width else []
    return texts


def _number_texts(array: np.ndarray) -> list[str]:
    if array.dtype.kind == "b":
        array = array.astype(np.int8)
    if array.dtype.kind != "f":
        return list(map(str, array.tolist()))
    texts: list[str] = array.astype(str).tolist()
    return texts if np.isfinite(array).all() else [_SPECIAL.get(text, text) for text in texts]


def _list(texts: Sequence[str]) -> str:
    return f"[{','.join(texts)}]"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
