"""/v1/completions of the scoring server: the part of vLLM's that scores prompts.

Left out on purpose: text, streams and answers of more than one token. Unknown keys are ignored, as by vLLM.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, FailFast, Field, ValidationError

from practicum.engines.protocol import Engine, ScoreOptions, ScoreRequest, Scores
from practicum.places.prompt_logprobs import KEY, pack
from practicum.serving.limits import Refusal
from practicum.user_code import shorten

_LARGEST = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=_LARGEST, strict=True)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
MOST_ENTRIES = 2**22
MOST_PACKED = 2**24
"""Logprobs of one answer: in vLLM's form and packed. The first take some 300 bytes each while it is made."""


class PackedRequest(BaseModel):
    """Scores of prompt[start:] as arrays: see `places.prompt_logprobs`."""

    start: Count = Field(ge=1)
    top_k: Count
    vocab: Count | None = Field(default=None, ge=1)


class Completion(BaseModel):
    """A request of /v1/completions."""

    model: str | None = None
    prompt: Annotated[list[TokenId], FailFast()] = Field(min_length=1)
    max_tokens: int = Field(default=16, ge=0, le=1, validate_default=True)
    prompt_logprobs: Count | None = None
    temperature: float | None = Field(default=None, ge=0, le=0, allow_inf_nan=False)
    """None is 1 for OpenAI: it is refused where a token is generated."""
    n: Literal[1] = 1
    stream: Literal[False] = False
    logprobs: None = None
    return_token_ids: bool = False
    packed_scores: PackedRequest | None = None


class RequestScorer:
    """Scores prompts by an engine, which batches what is asked at the same time."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        context: int,
        vocab: int,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """`adapters` are further models: the names of the engine's adapters by those that requests give."""
        self.engine, self.name, self.context, self.vocab = engine, name, context, vocab
        self.models: dict[str, str | None] = {name: None, **(adapters or {})}

    async def complete(self, body: bytes) -> str:
        """The answer to a request as JSON; a Refusal says why there is none."""
        request = read_request(body)
        self._check(request)
        wanted, ids, k = request.packed_scores, request.prompt, request.prompt_logprobs
        name = request.model or self.name
        adapter = self.models[name]
        if wanted is not None:
            row = ScoreRequest(ids, wanted.start, adapter=adapter)
            scores = await self.engine.score(row, ScoreOptions(wanted.top_k, vocab=wanted.vocab))
            return await self._write(lambda: packed_completion(name, request, pack(scores)))
        if k is None and not request.max_tokens:
            return await self._write(lambda: completion(name, request, None))
        # The token that is generated is the most likely one after the prompt: one more position to score,
        # whatever token is there.
        scored = [*ids, ids[-1]] if request.max_tokens else ids
        row = ScoreRequest(scored, len(ids) if k is None else 1, adapter=adapter)
        scores = await self.engine.score(row, ScoreOptions(max(k or 0, request.max_tokens)))
        return await self._write(lambda: completion(name, request, scores))

    async def _write(self, make: Callable[[], Any]) -> str:
        """Make an answer and write it, in a thread: a long one takes seconds, and others wait."""
        try:
            return await asyncio.to_thread(lambda: json.dumps(make(), allow_nan=False))
        except ValueError:
            raise Refusal(500, "the model's logprobs are not finite numbers: are its weights good?") from None

    def _check(self, request: Completion) -> None:
        ids, packed = request.prompt, request.packed_scores
        if request.model is not None and request.model not in self.models:
            known = ", ".join(map(repr, self.models))
            raise Refusal(404, f"there is no model {shorten(repr(request.model))} here, but {known}")
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
        k, outputs, positions, most = request.prompt_logprobs or 0, self.vocab, len(ids), MOST_ENTRIES
        if packed is not None:
            k, outputs = packed.top_k, min(packed.vocab or self.vocab, self.vocab)
            positions, most = len(ids) - packed.start, MOST_PACKED
            if packed.start > len(ids):
                raise Refusal(400, f"packed_scores.start is {packed.start}, beyond the {len(ids)} tokens")
        if k > outputs:
            raise Refusal(400, f"{k} logprobs for each position were asked for, the limit is {outputs}")
        if k * positions > most:
            found = f"{k} logprobs at {positions} positions are {k * positions} for one answer"
            raise Refusal(400, f"{found}, the limit is {most}")


def read_request(body: bytes) -> Completion:
    """A request from its JSON; a Refusal names what is wrong with it."""
    try:
        return Completion.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)[:3]
        raise Refusal(400, "; ".join(map(_sentence, problems))) from None


def _sentence(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else str(problem["msg"])


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


def completion(name: str, request: Completion, scores: Scores | None) -> Any:
    """The answer to a request for logprobs in vLLM's form; it offers the packed one."""
    k, made, entries = request.prompt_logprobs, [], None
    if scores is not None and request.max_tokens:
        assert scores.topk_ids is not None
        made = [int(scores.topk_ids[-1, 0])]
    if scores is not None and k is not None:
        entries = prompt_logprobs(scores, request.prompt, k)
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


def models_body(base: str, roots: Mapping[str, str], context: int, since: int) -> Any:
    """The list of the base and its adapters, with their folders."""
    entry = {"object": "model", "created": since, "owned_by": "practicum", "max_model_len": context}
    data = [
        {"id": name, **entry, "root": root, "parent": None if name == base else base}
        for name, root in roots.items()
    ]
    return {"object": "list", "data": data}


def _envelope(name: str, prompt: int, made: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
        "usage": usage,
    }
