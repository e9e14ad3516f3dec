"""A teacher behind a URL: an OpenAI-compatible completions server that returns prompt logprobs.

`probe_teacher` checks before the first step that the server can do that.
"""

from __future__ import annotations

from typing import Any

import torch

from practicum.engines.protocol import (
    LOGPROBS_ONLY,
    GenerateRequest,
    Generation,
    ScoreOptions,
    Scorer,
    ScoreRequest,
    Scores,
)
from practicum.errors import EngineError, RecipeError, TeacherError
from practicum.models.fingerprint import fingerprint_ids
from practicum.processes.http_client import Client, Unusable
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.teachers.prompt_logprobs import KEY, Misaligned, read_plain, read_scores

TOLERANCE = 1e-3
"""Nats by which two answers about one sequence may differ."""


class RemoteScorer(Client, Scorer):
    """A teacher behind a URL, with at most `teacher.concurrency` open requests."""

    serve_commands = "practicum serve or vllm serve"
    name_options = "practicum serve … --name, vllm serve … --served-model-name"
    advice = "if distill.top_k is above its limit: vllm serve … --max-logprobs, or lower distill.top_k"

    def __init__(self, name: str, teacher: Teacher) -> None:
        super().__init__(f"teacher {name}", f"teachers.{name}", teacher)
        self.name = name
        self._packs = False

    async def score(self, request: ScoreRequest, options: ScoreOptions = LOGPROBS_ONLY) -> Scores:
        """Return the scores of one row at temperature 1, which is all that servers offer."""
        if options.hidden or options.temperature != 1:
            what = "hidden states" if options.hidden else f"logprobs at temperature {options.temperature:g}"
            raise TeacherError(
                f"teacher {self.name} can't return {what} of {request.name}: "
                "a server returns logprobs at temperature 1"
            )
        if request.images is not None:
            raise TeacherError(
                f"teacher {self.name} can't see the images of {request.name}: load it here, without "
                f"teachers.{self.name}.url"
            )
        if request.start == len(request.ids):
            return read_plain([], [], 0, options.top_k)
        try:
            answer = await self.ask_scores(request, options.top_k, options.vocab)
            return read_scores(answer, request.ids, request.start, options.top_k)
        except Unusable as error:
            raise TeacherError(self.problem(request.name, str(error))) from error

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the server's greedy response, without logprobs. Raise EngineError if it can't sample one."""
        sampling, about = request.sampling, f"a response to prompt {request.counter.prompt}"
        body = {"model": self.model, "prompt": list(request.prompt_ids), "temperature": 0}
        body |= {"max_tokens": sampling.max_new_tokens, "stop_token_ids": sorted(sampling.stop)}
        body |= {"add_special_tokens": False, "return_token_ids": True}
        try:
            choice = (await self.ask("POST", "/completions", body, about))["choices"][0]
            tokens = torch.tensor(choice["token_ids"], dtype=torch.int64)
        except (TeacherError, KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(self.problem(about, f"no token ids of a response: {error}")) from error
        none = torch.full((len(tokens),), torch.nan)
        finish = "stop" if choice.get("finish_reason") == "stop" else "length"
        return Generation(tokens, none, none, finish, 0, 0)

    async def ask_scores(self, row: ScoreRequest, top_k: int, vocab: int | None = None) -> Any:
        """Return the server's answer about a row as it came: packed if the server has offered that before."""

        def body() -> Any:
            request: dict[str, Any] = {"model": self.model, "prompt": list(row.ids)}
            if self._packs:  # outputs beyond `vocab` do not count
                wanted = {"start": row.start, "top_k": top_k, "vocab": vocab}
                return request | {"max_tokens": 0, KEY: wanted}
            # One token must be generated; greedily, so that it costs no random numbers.
            request |= {"prompt_logprobs": max(1, top_k), "max_tokens": 1, "temperature": 0}
            return request | {"add_special_tokens": False, "return_token_ids": True}

        answer = await self.ask("POST", "/completions", body, row.name)
        self._packs = self._packs or (isinstance(answer, dict) and answer.get(KEY) is True)
        return answer


async def probe_teacher(
    teacher: RemoteScorer, options: ScoreOptions, vocab_size: int, context_needed: int
) -> None:
    """Ask a server for its models and, twice, for the scores of a known sequence. Raise a RecipeError if it
    fails. `context_needed` is the longest prompt and response together."""
    longest = (await teacher.check_model()).get("max_model_len")
    if longest is not None and longest < context_needed + 1:
        raise RecipeError(
            f"{teacher.path}.url",
            f"a server for sequences of {longest} tokens (its max_model_len)",
            f"{context_needed + 1} or more: the longest prompt and response, and one token that it generates",
            f"serve it with --max-model-len {context_needed + 1} (practicum serve: --context), or shorten "
            "prompts or answers",
        )
    row = ScoreRequest(fingerprint_ids(vocab_size), 1, "the probe")
    first = await _probe_scores(teacher, row, options.top_k)
    second = await _probe_scores(teacher, row, options.top_k)
    gap = (first.logprobs - second.logprobs).abs().max().item()
    if gap > TOLERANCE:
        raise RecipeError(
            f"{teacher.path}.url",
            f"a server that is not deterministic: one sequence scored twice differs by {gap:.2g} nats",
            f"the same logprobs within {TOLERANCE:g} nats",
            "serve one copy of one model behind this URL, if need be with --dtype float32",
        )


async def _probe_scores(teacher: RemoteScorer, row: ScoreRequest, top_k: int) -> Scores:
    with teacher.recipe_errors("the scores of a known sequence"):
        answer = await teacher.ask_scores(row, top_k)
    try:
        return read_scores(answer, row.ids, row.start, top_k)
    except Misaligned as error:
        raise RecipeError(
            f"{teacher.path}.url",
            f"token ids that are not aligned: {error}",
            "logprobs of exactly the token ids that are sent",
            "the server must take `prompt` as token ids and neither add nor cut any; older vLLM servers "
            "need --no-enable-prefix-caching",
        ) from error
    except Unusable as error:
        raise RecipeError(
            f"{teacher.path}.url",
            f"a server that can't score prompts: {error}",
            "logprobs of the prompt's tokens",
            "use a server that knows `prompt_logprobs`, such as practicum serve or vllm serve, or load "
            "the model without url",
        ) from error
