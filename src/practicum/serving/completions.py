"""The scoring server, over any engine: the subset of vLLM's /v1/completions that scores prompts.

Responses are greedy token ids. Text prompts and streams are not supported. Unknown keys are ignored, as in
vLLM.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, FailFast, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from practicum.engines.protocol import (
    Counter,
    Engine,
    GenerateRequest,
    Sampling,
    ScoreOptions,
    ScoreRequest,
    Scores,
)
from practicum.processes.http_server import Refusal, json_response, make_app, read_body, sent_key
from practicum.teachers.prompt_logprobs import KEY, pack
from practicum.user_code import shorten

_LARGEST = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=_LARGEST, strict=True)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
MOST_ENTRIES = 2**22
MOST_PACKED = 2**24
"""Maximum logprobs of a response, in vLLM's format (300 bytes each) and packed."""


class PackedRequest(BaseModel):
    """A request for the scores of prompt[start:] as arrays. See `teachers.prompt_logprobs`."""

    start: Count = Field(ge=1)
    top_k: Count
    vocab: Count | None = Field(default=None, ge=1)


class Completion(BaseModel):
    model: str | None = None
    prompt: Annotated[list[TokenId], FailFast()] = Field(min_length=1)
    max_tokens: Count = 16
    stop_token_ids: list[TokenId] = []
    prompt_logprobs: Count | None = None
    temperature: float | None = Field(default=None, ge=0, le=0, allow_inf_nan=False)
    """Unset is 1 in OpenAI's API, so None is refused if a token is generated."""
    n: Literal[1] = 1
    stream: Literal[False] = False
    logprobs: None = None
    return_token_ids: bool = False
    packed_scores: PackedRequest | None = None


class RequestScorer:
    """Scores prompts by an engine. `adapters` maps names of further models to the engine's adapters."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        context: int,
        vocab: int,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self.engine, self.name, self.context, self.vocab = engine, name, context, vocab
        self.models: dict[str, str | None] = {name: None, **(adapters or {})}

    async def complete(self, body: bytes) -> str:
        """Return the response to a request as JSON, or raise a Refusal."""
        try:
            request = Completion.model_validate_json(body)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)[:3]
            texts = (": ".join(filter(None, [".".join(map(str, p["loc"])), p["msg"]])) for p in problems)
            raise Refusal(400, "; ".join(texts)) from None
        self._check(request)
        scores, new_ids = await self._score(request), await self._generate(request)
        try:  # in a thread: serialising a long response takes seconds
            return await asyncio.to_thread(
                lambda: json.dumps(self._response(request, scores, new_ids), allow_nan=False)
            )
        except ValueError:
            raise Refusal(500, "the model's logprobs are not finite: check its weights") from None

    def _check(self, request: Completion) -> None:
        ids, packed = request.prompt, request.packed_scores
        if request.model is not None and request.model not in self.models:
            known = ", ".join(map(repr, self.models))
            raise Refusal(404, f"unknown model {shorten(repr(request.model))}, expected {known}")
        if (largest := max(ids)) >= self.vocab:
            raise Refusal(400, f"token id {largest} is not below the vocabulary's size of {self.vocab}")
        if len(ids) + request.max_tokens > self.context:
            asked = f"a prompt of {len(ids)} tokens and max_tokens {request.max_tokens}"
            raise Refusal(400, f"{asked} are more than the context of {self.context}")
        if request.max_tokens and request.temperature is None:
            raise Refusal(400, "temperature must be 0: only the most likely tokens are generated")
        if request.max_tokens > 1 and self.models[request.model or self.name] is not None:
            raise Refusal(400, "max_tokens must be 0 or 1: adapters only score")
        k, outputs, positions, most = request.prompt_logprobs or 0, self.vocab, len(ids), MOST_ENTRIES
        if packed is not None:
            k, outputs = packed.top_k, min(packed.vocab or self.vocab, self.vocab)
            positions, most = len(ids) - packed.start, MOST_PACKED
            if packed.start > len(ids):
                raise Refusal(400, f"packed_scores.start is {packed.start}, beyond the {len(ids)} tokens")
        if k > outputs:
            raise Refusal(400, f"{k} logprobs per position exceed the limit of {outputs}")
        if k * positions > most:
            raise Refusal(400, f"{k} logprobs at {positions} positions exceed the limit of {most} in total")

    async def _generate(self, request: Completion) -> list[int]:
        """Return more than one token. A single one is found by scoring."""
        if request.max_tokens <= 1:
            return []
        ends = getattr(getattr(self.engine.model, "generation_config", None), "eos_token_id", None)
        stop = {*request.stop_token_ids, *(ends if isinstance(ends, list) else [ends])} - {None}
        sampling = Sampling(request.max_tokens, frozenset(stop), greedy=True)
        generation = await self.engine.generate(GenerateRequest(request.prompt, sampling, Counter(0, 0)))
        return generation.tokens.tolist()

    async def _score(self, request: Completion) -> Scores | None:
        wanted, ids, k = request.packed_scores, request.prompt, request.prompt_logprobs
        adapter = self.models[request.model or self.name]
        if wanted is not None:
            row = ScoreRequest(ids, wanted.start, adapter=adapter)
            return await self.engine.score(row, ScoreOptions(wanted.top_k, vocab=wanted.vocab))
        if k is None and request.max_tokens != 1:
            return None
        # The generated token is the most likely one after the prompt, found by scoring one more position with
        # any token.
        scored = [*ids, ids[-1]] if request.max_tokens == 1 else ids
        row = ScoreRequest(scored, len(ids) if k is None else 1, adapter=adapter)
        return await self.engine.score(row, ScoreOptions(max(k or 0, int(request.max_tokens == 1))))

    def _response(self, request: Completion, scores: Scores | None, new_ids: list[int]) -> Any:
        """Return packed scores if requested, else vLLM's format with a hint that these exist."""
        ids, k = request.prompt, request.prompt_logprobs
        response: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model or self.name,
            "choices": [],
        }
        if request.packed_scores is not None:
            assert scores is not None
            response[KEY] = pack(scores)
        else:
            if scores is not None and request.max_tokens == 1:
                assert scores.topk_ids is not None
                new_ids = [int(scores.topk_ids[-1, 0])]
            choice = {
                "index": 0,
                "text": "",
                "logprobs": None,
                "finish_reason": "length" if len(new_ids) == request.max_tokens else "stop",
                "prompt_logprobs": None if scores is None or k is None else prompt_logprobs(scores, ids, k),
                "prompt_token_ids": ids if request.return_token_ids else None,
                "token_ids": new_ids if request.return_token_ids else None,
            }
            response |= {"choices": [choice], KEY: True}
        total = len(ids) + len(new_ids)
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(new_ids), "total_tokens": total}
        return {**response, "usage": usage}


def prompt_logprobs(scores: Scores, ids: Sequence[int], k: int) -> list[Any]:
    """Return scores of ids[1:] in vLLM's format; a token outside of the top k has rank k + 1."""
    entries: list[Any] = [None]
    best = (([], []) for _ in ids[1:])
    if k:
        assert scores.topk_ids is not None
        assert scores.topk_logprobs is not None
        best = zip(scores.topk_ids[:, :k].tolist(), scores.topk_logprobs[:, :k].tolist(), strict=True)
    for token, logprob, (top_ids, top_logprobs) in zip(ids[1:], scores.logprobs.tolist(), best, strict=False):
        entry = {str(token): {"logprob": logprob, "rank": k + 1, "decoded_token": None}}
        ranked = enumerate(zip(top_ids, top_logprobs, strict=True), start=1)
        entry |= {str(i): {"logprob": p, "rank": rank, "decoded_token": None} for rank, (i, p) in ranked}
        entries.append(entry)
    return entries


def scoring_app(
    scorer: RequestScorer, roots: Mapping[str, str], max_body: int, api_key: str | None = None
) -> Starlette:
    """Create the application, which closes the scorer's engine when it stops. `roots` maps model names to
    folders. Requests have at most `max_body` bytes, and all except /health need the key."""
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        scorer.engine.close()

    def check_key(request: Request) -> None:
        if api_key is not None and not hmac.compare_digest(sent_key(request).encode(), api_key.encode()):
            raise Refusal(401, "the key is missing or wrong: send it as `Authorization: Bearer KEY`")

    async def health(_: Request) -> Response:
        return Response()

    async def models(request: Request) -> Response:
        check_key(request)
        entry = {"object": "model", "created": created, "owned_by": "practicum"}
        entry["max_model_len"] = scorer.context
        data = [
            {"id": name, **entry, "root": root, "parent": None if name == scorer.name else scorer.name}
            for name, root in roots.items()
        ]
        return json_response({"object": "list", "data": data})

    async def completions(request: Request) -> Response:
        check_key(request)
        body = await read_body(request, max_body, " (see --max-body-mb)")
        return Response(await scorer.complete(body), media_type="application/json")

    routes = [Route("/health", health), Route("/v1/models", models)]
    routes.append(Route("/v1/completions", completions, methods=["POST"]))
    return make_app(routes, lifespan=lifespan)
