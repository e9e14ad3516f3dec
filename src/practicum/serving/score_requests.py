"""Answers of the scoring server: requests checked against the model, then scored by its engine."""

from __future__ import annotations

from typing import Any

from practicum.engines.protocol import Engine
from practicum.places.prompt_logprobs import pack
from practicum.serving.completion_format import (
    Completion,
    PackedRequest,
    completion,
    packed_completion,
    prompt_logprobs,
)


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
        # The token that is generated is the most likely one behind the prompt: one more position to score,
        # whatever stands there.
        asked = [*ids, ids[-1]] if request.max_tokens else ids
        start = len(ids) if k is None else 1
        scores = await self.engine.score(asked, start, max(k or 0, request.max_tokens))
        token = None
        if request.max_tokens:
            assert scores.topk_ids is not None
            token = int(scores.topk_ids[-1, 0])
        entries = None if k is None else prompt_logprobs(_first(scores, len(ids) - 1), ids, k)
        return completion(self.name, request, entries, token)

    async def _packed(self, request: Completion, wish: PackedRequest) -> Any:
        scores = await self.engine.score(request.prompt, wish.start, wish.top_k, vocab=wish.vocab)
        return packed_completion(self.name, request, pack(scores))

    def _check(self, request: Completion) -> None:
        ids, wish = request.prompt, request.packed_scores
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
        if wish is not None:
            k, outputs = wish.top_k, min(wish.vocab or self.vocab, self.vocab)
            if wish.start > len(ids):
                raise Refusal(400, f"packed_scores.start is {wish.start}, beyond the {len(ids)} tokens")
        if k > outputs:
            raise Refusal(400, f"{k} logprobs for each position were asked for, the limit is {outputs}")


def _first(scores: Any, count: int) -> Any:
    """The scores of the first tokens."""
    ids, best = scores.topk_ids, scores.topk_logprobs
    top = (None, None) if ids is None else (ids[:count], best[:count])
    return type(scores)(scores.logprobs[:count], *top, scores.version)
