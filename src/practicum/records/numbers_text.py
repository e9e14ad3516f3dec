"""Tensors as JSON: every float is the shortest text that reads back to the same bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SPECIAL = {"nan": "null", "inf": "1e999", "-inf": "-1e999"}


def tensor_text(values: Tensor) -> str:
    """A tensor of any shape as nested lists; booleans are 0 and 1."""
    values = values.detach().cpu()
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    texts = _texts(values.reshape(-1).numpy())
    for width in reversed(values.shape[1:]):
        texts = [_list(texts[i : i + width]) for i in range(0, len(texts), width)] if width else []
    return _list(texts) if values.dim() else texts[0]


def plain_text(value: Any) -> str:
    """JSON of a plain value; a tensor in it comes with its type."""
    return json.dumps(_plain(value), ensure_ascii=False)


def _texts(array: np.ndarray) -> list[str]:
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
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
