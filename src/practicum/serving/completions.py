"""/v1/completions of the scoring server: the part of vLLM's that scores prompts.

Left out on purpose: text, streams and answers of more than one token. Unknown keys are ignored, as by vLLM.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from practicum.engines.protocol import Engine, ScoreOptions, ScoreRequest, Scores
from practicum.places.prompt_logprobs import KEY, pack

TokenId = Annotated[int, Field(ge=0, strict=True)]


class PackedRequest(BaseModel):
    """Scores of prompt[start:] as arrays: see `places.prompt_logprobs`."""

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


class Refusal(Exception):
    """A request that can't be met: a status and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(message)


class RequestScorer:
    """Scores prompts by an engine, which batches what is asked at the same time."""

    def __init__(self, engine: Engine, name: str, *, context: int, vocab: int) -> None:
        self.engine, self.name, self.context, self.vocab = engine, name, context, vocab

    async def complete(self, request: Completion) -> Any:
        """The answer to a request; a Refusal says why there is none."""
        self._check(request)
        if request.packed_scores is not None:
            return await self._packed(request, request.packed_scores)
        ids, k = request.prompt, request.prompt_logprobs
        if k is None and not request.max_tokens:
            return completion(self.name, request, None, None)
        # The token that is generated is the most likely one after the prompt: one more position to score,
        # whatever token is there.
        scored = [*ids, ids[-1]] if request.max_tokens else ids
        start = len(ids) if k is None else 1
        scores = await self.engine.score(
            ScoreRequest(scored, start), ScoreOptions(top_k=max(k or 0, request.max_tokens))
        )
        token = None
        if request.max_tokens:
            assert scores.topk_ids is not None
            token = int(scores.topk_ids[-1, 0])
        entries = None if k is None else prompt_logprobs(scores, ids, k)
        return completion(self.name, request, entries, token)

    async def _packed(self, request: Completion, wanted: PackedRequest) -> Any:
        scores = await self.engine.score(
            ScoreRequest(request.prompt, wanted.start), ScoreOptions(top_k=wanted.top_k, vocab=wanted.vocab)
        )
        return packed_completion(self.name, request, pack(scores))

    def _check(self, request: Completion) -> None:
        ids, packed = request.prompt, request.packed_scores
        if request.model not in (None, self.name):
            raise Refusal(404, f"there is no model {request.model!r} here, but {self.name!r}")
        if (largest := max(ids)) >= self.vocab:
            raise Refusal(400, f"token id {largest} is not below the vocabulary's size of {self.vocab}")
        if len(ids) + request.max_tokens > self.context:
            raise Refusal(
                400,
                f"a prompt of {len(ids)} tokens and max_tokens {request.max_tokens} are more than the "
                f"context of {self.context}",
            )
        if request.max_tokens and request.temperature is None:
            raise Refusal(400, "temperature: the one token is the most likely one, so set it to 0")
        k, outputs = request.prompt_logprobs or 0, self.vocab
        if packed is not None:
            k, outputs = packed.top_k, min(packed.vocab or self.vocab, self.vocab)
            if packed.start > len(ids):
                raise Refusal(400, f"packed_scores.start is {packed.start}, beyond the {len(ids)} tokens")
        if k > outputs:
            raise Refusal(400, f"{k} logprobs for each position were asked for, the limit is {outputs}")


def prompt_logprobs(scores: Scores, ids: Sequence[int], k: int) -> list[Any]:
    """Scores of ids[1:] in vLLM's form: nothing for the first token, then entries by token id.

    Scores of a token after them are left out. The prompt's own token has the rank k + 1 where it is not among
    the k most likely.
    """
    entries: list[Any] = [None]
    if k:
        assert scores.topk_ids is not None
        assert scores.topk_logprobs is not None
        best = zip(scores.topk_ids[:, :k].tolist(), scores.topk_logprobs[:, :k].tolist(), strict=True)
    else:
        best = (([], []) for _ in ids[1:])
    for token, logprob, (top_ids, top_logprobs) in zip(ids[1:], scores.logprobs.tolist(), best, strict=False):
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
