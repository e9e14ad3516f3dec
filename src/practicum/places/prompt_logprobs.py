"""The words a completions server is asked in for the logprobs of a prompt, and what it answers.

The form is vLLM's: `prompt` is a list of token ids, `prompt_logprobs` the number of most likely tokens; the
answer has for each position but the first {token id: {logprob, rank}} of these and of the prompt's own token.
`practicum serve` has a smaller form beside it: see `packed`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from practicum.engines.protocol import Scores
from practicum.places.packed_scores import KEY, unpack

_LIMIT = re.compile(r"(?:max|most|limit|up to|exceed)\D{0,40}(\d+)", re.IGNORECASE)


class Unusable(ValueError):
    """An answer without the scores that were asked for: says what is missing."""


class Misaligned(Unusable):
    """An answer about other tokens than those that were sent."""


def request_body(model: str, ids: Sequence[int], k: int) -> dict[str, Any]:
    """A request for the logprobs of `ids`, with the k most likely tokens of each position.

    One token must be generated; greedily, so that it costs no random numbers.
    """
    return {
        "model": model,
        "prompt": list(ids),
        "prompt_logprobs": k,
        "max_tokens": 1,
        "temperature": 0,
        "add_special_tokens": False,
        "return_token_ids": True,
    }


def read_scores(answer: Any, ids: Sequence[int], start: int, top_k: int) -> Scores:
    """Scores of ids[start:] from a server's answer; Unusable or Misaligned if they are not all there."""
    packed = answer.get(KEY) if isinstance(answer, dict) else None
    name = KEY if isinstance(packed, dict) else "prompt_logprobs"
    try:
        if isinstance(packed, dict):
            scores = unpack(packed, len(ids) - start, top_k)
        else:
            scores = _read_plain(_positions(answer, ids), ids, start, top_k)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, Unusable):
            raise
        raise Unusable(f"its {name} can't be read ({type(error).__name__}: {error})") from error
    best = scores.topk_logprobs
    if not scores.logprobs.isfinite().all() or not (best is None or best.isfinite().all()):
        raise Unusable("some of its logprobs are not finite numbers")
    return scores


def _read_plain(positions: Sequence[Any], ids: Sequence[int], start: int, top_k: int) -> Scores:
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
        raise Unusable("its answer has no choices as /v1/completions gives them") from error
    if not positions:
        raise Unusable("its answer has no prompt_logprobs")
    if echoed is not None and list(echoed) != list(ids):
        raise Misaligned(f"it scored {len(echoed)} other token ids than the {len(ids)} that were sent")
    if len(positions) != len(ids):
        raise Misaligned(f"it gave logprobs of {len(positions)} positions for {len(ids)} tokens")
    return positions


def _read_position(
    entry: Mapping[str, Any] | None, token: int, at: int, top_k: int
) -> tuple[float, list[tuple[int, float]]]:
    """The logprob of a token, and the most likely tokens of its position, best first."""
    if entry is None:
        raise Unusable(f"it gave no logprobs for position {at}")
    if (own := entry.get(str(token))) is None:
        raise Misaligned(f"the logprobs of position {at} lack the token {token} that was sent there")
    top: list[tuple[int, float]] = []
    if top_k:
        ranked = [(e["rank"], int(i) == token, int(i), e["logprob"]) for i, e in entry.items()]
        # Equally likely tokens may share a rank: then the prompt's own token is the extra one.
        top = [(i, logprob) for rank, _, i, logprob in sorted(ranked)[:top_k] if rank <= top_k]
        if len(top) < top_k:
            raise Unusable(f"it gave {len(top)} of the {top_k} most likely tokens of position {at}")
    return own["logprob"], top


def limit_in(message: str) -> int | None:
    """The limit that a server's refusal names, if it names one."""
    found = _LIMIT.findall(message)
    return int(found[-1]) if found else None


def message_of(text: str) -> str:
    """What a server says in the body of a refusal, without its wrapping."""
    try:
        said = json.loads(text)
    except ValueError:
        said = text
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    words = said if isinstance(said, str) else str(said)
    words = " ".join(words.split())
    return words[:500] or "(no message)"
