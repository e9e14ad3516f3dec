"""Request the logprobs of a prompt from a completions server, and parse its response.

The form is vLLM's: `prompt` is a list of token ids, `prompt_logprobs` the number of most likely tokens; the
answer has for each position but the first {token id: {logprob, rank}} of these and of the prompt's own token.

`practicum serve` also has a smaller form: three arrays in base64. A server offers it by `packed_scores: true`
in an answer. Only such a server is asked for it. The prompt's positions are not sent back, rows with one
prompt share its work, and nothing is generated.
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
from practicum.processes.http_client import Unusable

KEY = "packed_scores"
_TYPES: dict[str, tuple[Any, torch.dtype]] = {
    "logprobs": ("<f4", torch.float32),
    "topk_ids": ("<i4", torch.int64),
    "topk_logprobs": ("<f4", torch.float32),
}


class Misaligned(Unusable):
    """An answer about other tokens than those that were sent."""


def read_scores(answer: Any, ids: Sequence[int], start: int, top_k: int) -> Scores:
    """Return scores of ids[start:] from an answer. Raise Unusable or Misaligned if some are missing."""
    packed = answer.get(KEY) if isinstance(answer, dict) else None
    name = KEY if isinstance(packed, dict) else "prompt_logprobs"
    try:
        if isinstance(packed, dict):
            scores = unpack(packed, len(ids) - start, top_k)
        else:
            scores = read_plain(_positions(answer, ids), ids, start, top_k)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, Unusable):
            raise
        raise Unusable(f"its {name} can't be read ({type(error).__name__}: {error})") from error
    best = scores.topk_logprobs
    if not scores.logprobs.isfinite().all() or not (best is None or best.isfinite().all()):
        raise Unusable("some of its logprobs are not finite numbers")
    return scores


def read_plain(positions: Sequence[Any], ids: Sequence[int], start: int, top_k: int) -> Scores:
    """Return scores of ids[start:] from vLLM's entries of all positions."""
    logprobs_R: list[float] = []
    topk_ids_RK: list[list[int]] = []
    topk_logprobs_RK: list[list[float]] = []
    for at in range(start, len(ids)):
        sampled, top = _read_position(positions[at], ids[at], at, top_k)
        logprobs_R.append(sampled)
        topk_ids_RK.append([token for token, _ in top])
        topk_logprobs_RK.append([logprob for _, logprob in top])
    return Scores(
        torch.tensor(logprobs_R),
        torch.tensor(topk_ids_RK, dtype=torch.int64).reshape(-1, top_k) if top_k else None,
        torch.tensor(topk_logprobs_RK).reshape(-1, top_k) if top_k else None,
        version=0,
    )


def _positions(answer: Any, ids: Sequence[int]) -> Sequence[Any]:
    try:
        choice = answer["choices"][0]
        positions, echoed = choice.get("prompt_logprobs"), choice.get("prompt_token_ids")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Unusable("its response has no choices as those of /v1/completions") from error
    if not positions:
        raise Unusable("its answer has no prompt_logprobs")
    if echoed is not None and list(echoed) != list(ids):
        raise Misaligned(f"it scored {len(echoed)} other token ids than the {len(ids)} that were sent")
    if len(positions) != len(ids):
        raise Misaligned(f"it returned logprobs of {len(positions)} positions for {len(ids)} tokens")
    return positions


def _read_position(
    entry: Mapping[str, Any] | None, token: int, at: int, top_k: int
) -> tuple[float, list[tuple[int, float]]]:
    """Return the logprob of a token, and the most likely tokens of its position, best first."""
    if entry is None:
        raise Unusable(f"it returned no logprobs for position {at}")
    if (own := entry.get(str(token))) is None:
        raise Misaligned(f"the logprobs of position {at} do not have the token {token} that was sent there")
    top: list[tuple[int, float]] = []
    if top_k:
        ranked = [(e["rank"], int(i) == token, int(i), e["logprob"]) for i, e in entry.items()]
        # Equally likely tokens may share a rank: then the prompt's own token is the extra one.
        top = [(i, logprob) for rank, _, i, logprob in sorted(ranked)[:top_k] if rank <= top_k]
        if len(top) < top_k:
            raise Unusable(f"it returned {len(top)} of the {top_k} most likely tokens of position {at}")
    return own["logprob"], top


def pack(scores: Scores) -> dict[str, str]:
    arrays = {name: getattr(scores, name) for name in _TYPES}
    return {
        name: base64.b64encode(array.numpy().astype(_TYPES[name][0]).tobytes()).decode()
        for name, array in arrays.items()
        if array is not None
    }


def unpack(packed: Mapping[str, Any], count: int, top_k: int) -> Scores:
    """Return scores of `count` tokens. Raise ValueError, KeyError or TypeError for malformed arrays."""
    logprobs = _decode(packed, "logprobs", (count,))
    if not top_k:
        return Scores(logprobs, None, None, version=0)
    ids = _decode(packed, "topk_ids", (count, top_k))
    return Scores(logprobs, ids, _decode(packed, "topk_logprobs", (count, top_k)), version=0)


def _decode(packed: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    kind, dtype = _TYPES[name]
    try:
        array = np.frombuffer(base64.b64decode(packed[name], validate=True), kind)
        return torch.from_numpy(array.reshape(shape).copy()).to(dtype)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name} of shape {list(shape)}: {error}") from error
