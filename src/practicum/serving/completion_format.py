"""What the scoring server is asked and answers: the part of vLLM's /v1/completions that scores prompts.

Left out on purpose: text, streams and answers of more than one token. Unknown keys are not looked at, as by
vLLM.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from practicum.engines.protocol import Scores
from practicum.places.prompt_logprobs import KEY

TokenId = Annotated[int, Field(ge=0, strict=True)]


class PackedRequest(BaseModel):
    """Scores of prompt[start:] as arrays: see `teachers.packed`."""

    start: int = Field(ge=1)
    top_k: int = Field(ge=0)
    vocab: int | None = Field(default=None, ge=1)


class Completion(BaseModel):
    """A request of /v1/completions."""

    model: str | None = None
    prompt: list[TokenId] = Field(min_length=1)
    max_tokens: int = Field(default=16, ge=0, le=1, validate_default=True)
    prompt_logprobs: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=0)
    """None is 1 for OpenAI: it is refused where a token is generated."""
    n: Literal[1] = 1
    stream: Literal[False] = False
    logprobs: None = None
    return_token_ids: bool = False
    packed_scores: PackedRequest | None = None


def prompt_logprobs(scores: Scores, ids: Sequence[int], k: int) -> list[Any]:
    """Scores of ids[1:] in vLLM's form: nothing for the first token, then entries by token id.

    The prompt's own token has the rank k + 1 where it is not among the k most likely.
    """
    entries: list[Any] = [None]
    if k:
        assert scores.topk_ids is not None
        assert scores.topk_logprobs is not None
        best = zip(scores.topk_ids[:, :k].tolist(), scores.topk_logprobs[:, :k].tolist(), strict=True)
    else:
        best = (([], []) for _ in ids[1:])
    for token, logprob, (top_ids, top_logprobs) in zip(ids[1:], scores.logprobs.tolist(), best, strict=True):
        entry = {str(token): {"logprob": logprob, "rank": k + 1, "decoded_token": None}}
        ranked = enumerate(zip(top_ids, top_logprobs, strict=True), start=1)
        entry |= {str(i): {"logprob": p, "rank": rank, "decoded_token": None} for rank, (i, p) in ranked}
        entries.append(entry)
    return entries


def completion(name: str, request: Completion, entries: list[Any] | None, token: int | None) -> Any:
    """The answer to a request for logprobs in vLLM's form; it offers the packed one."""
    made = [] if token is None else [token]
    choice = {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "length",
        "prompt_logprobs": entries,
        "prompt_token_ids": request.prompt if request.return_token_ids else None,
        "token_ids": made if request.return_token_ids else None,
    }
    return {**_envelope(name, len(request.prompt), len(made)), "choices": [choice], KEY: True}


def packed_completion(name: str, request: Completion, packed: dict[str, str]) -> Any:
    """The answer to a request for packed scores."""
    return {**_envelope(name, len(request.prompt), 0), "choices": [], KEY: packed}


def error_body(status: int, message: str) -> Any:
    """A refusal in OpenAI's form."""
    return {"error": {"message": message, "type": "error", "param": None, "code": status}}


def models_body(name: str, root: str, context: int, since: int) -> Any:
    """The list of the one model."""
    entry = {"id": name, "object": "model", "created": since, "owned_by": "practicum"}
    return {"object": "list", "data": [{**entry, "root": root, "max_model_len": context}]}


def _envelope(name: str, prompt: int, made: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
        "usage": usage,
    }
