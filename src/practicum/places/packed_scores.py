"""Scores of a row as three arrays in base64, which `practicum serve` offers beside vLLM's form.

A server offers it by `packed_scores: true` in an answer; only such a server is asked for it. Against vLLM's
form, the prompt's positions do not travel, rows with one prompt share its work, and nothing is generated.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from practicum.engines.protocol import Scores

KEY = "packed_scores"
_TYPES: dict[str, tuple[Any, torch.dtype]] = {
    "logprobs": ("<f4", torch.float32),
    "topk_ids": ("<i4", torch.int64),
    "topk_logprobs": ("<f4", torch.float32),
}


def offers_packed(answer: Any) -> bool:
    """Whether the server that answered so can be asked for packed scores."""
    return isinstance(answer, dict) and answer.get(KEY) is True


def packed_request(model: str, ids: Sequence[int], start: int, top_k: int, vocab: int | None) -> Any:
    """A request for the packed scores of ids[start:]; outputs beyond `vocab` do not count."""
    wish = {"start": start, "top_k": top_k, "vocab": vocab}
    return {"model": model, "prompt": list(ids), "max_tokens": 0, KEY: wish}


def pack(scores: Scores) -> dict[str, str]:
    """The arrays of some scores."""
    arrays = {name: getattr(scores, name) for name in _TYPES}
    return {name: _encode(array, _TYPES[name][0]) for name, array in arrays.items() if array is not None}


def unpack(packed: Mapping[str, Any], count: int, top_k: int) -> Scores:
    """Scores of `count` tokens; ValueError, KeyError or TypeError if these arrays are not they."""
    logprobs = _decode(packed, "logprobs", (count,))
    if not top_k:
        return Scores(logprobs, None, None, version=0)
    ids = _decode(packed, "topk_ids", (count, top_k))
    return Scores(logprobs, ids, _decode(packed, "topk_logprobs", (count, top_k)), version=0)


def _encode(array: Tensor, kind: str) -> str:
    return base64.b64encode(array.numpy().astype(kind).tobytes()).decode()


def _decode(packed: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    kind, dtype = _TYPES[name]
    try:
        found = np.frombuffer(base64.b64decode(packed[name], validate=True), kind)
        return torch.from_numpy(found.reshape(shape).copy()).to(dtype)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name} of shape {list(shape)}: {error}") from error
