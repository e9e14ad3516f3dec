"""Whether a server can be a teacher, found out before the first step; if not, a RecipeError says why."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from practicum.engines.protocol import Scores
from practicum.errors import RecipeError
from practicum.models.fingerprint import fingerprint_ids
from practicum.places.place import ScoreOptions, ScoreRow
from practicum.places.prompt_logprobs import Misaligned, Unusable, limit_in, read_scores
from practicum.places.remote_teacher import Refused, RemoteTeacher, Unreachable

TOLERANCE = 1e-3
"""Nats by which two answers about one sequence may differ."""


async def probe(teacher: RemoteTeacher, wanted: ScoreOptions, vocab_size: int, context_needed: int) -> None:
    """Ask a server for its models and, twice, for the scores of a known sequence.

    `context_needed` is the longest prompt and response together.
    """
    await _check_models(teacher, context_needed)
    row = ScoreRow(fingerprint_ids(vocab_size), 1, "the probe")
    first = await _scores(teacher, row, wanted.top_k)
    second = await _scores(teacher, row, wanted.top_k)
    gap = (first.logprobs - second.logprobs).abs().max().item()
    if gap > TOLERANCE:
        raise _error(
            teacher,
            "url",
            f"a server that is not deterministic: one sequence scored twice differs by {gap:.2g} nats",
            f"the same logprobs within {TOLERANCE:g} nats",
            "serve one copy of one model behind this URL, if need be with --dtype float32",
        )


async def _check_models(teacher: RemoteTeacher, context_needed: int) -> None:
    models = await _ask(teacher, "its list of models", teacher.models())
    if teacher.model not in models:
        raise _error(
            teacher,
            "model",
            teacher.model,
            f"a model of {teacher.url}: {', '.join(sorted(models)) or 'it has none'}",
            "take one of these names, or serve the model under this one (practicum serve … --name, "
            "vllm serve … --served-model-name)",
        )
    longest = models[teacher.model].get("max_model_len")
    if longest is not None and longest < context_needed + 1:
        raise _error(
            teacher,
            "url",
            f"a server for sequences of {longest} tokens (its max_model_len)",
            f"{context_needed + 1} or more: the longest prompt and response, and one token that it generates",
            f"serve it with --max-model-len {context_needed + 1} (practicum serve: --context), or shorten "
            "prompts or answers",
        )


async def _scores(teacher: RemoteTeacher, row: ScoreRow, top_k: int) -> Scores:
    try:
        answer = await teacher.ask_scores(row, top_k)
    except Refused as refusal:
        await _blame_top_k(teacher, row, top_k, refusal)
        raise _refused(teacher, "the scores of a known sequence", refusal) from refusal
    except Unreachable as error:
        raise _unreachable(teacher, error) from error
    try:
        return read_scores(answer, row.ids, row.start, top_k)
    except Misaligned as error:
        raise _error(
            teacher,
            "url",
            f"token ids that are not aligned: {error}",
            "logprobs of exactly the token ids that are sent",
            "the server must take `prompt` as token ids and neither add nor cut any; older vLLM servers "
            "need --no-enable-prefix-caching",
        ) from error
    except Unusable as error:
        raise _error(
            teacher,
            "url",
            f"a server that can't score prompts: {error}",
            "logprobs of the prompt's tokens",
            "use a server that knows `prompt_logprobs`, such as practicum serve or vllm serve, or load "
            "the model without url",
        ) from error


async def _blame_top_k(teacher: RemoteTeacher, row: ScoreRow, top_k: int, refusal: Refused) -> None:
    """Raise the error about top_k if the server does score with less of it."""
    if top_k <= 1:
        return
    try:
        await teacher.ask_scores(row, 1)
    except Refused:
        return
    limit = limit_in(refusal.message)
    known = f"at most {limit}" if limit is not None else "less"
    raise _error(
        teacher,
        "url",
        f"a server that refuses top_k {top_k} ({refusal.message})",
        f"{known}, which is its limit, or a server with a higher one",
        f"serve it with `vllm serve {teacher.model} --max-logprobs {top_k}`, or set distill.top_k to {known}",
    ) from refusal


async def _ask(teacher: RemoteTeacher, what: str, answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except Refused as refusal:
        raise _refused(teacher, what, refusal) from refusal
    except Unreachable as error:
        raise _unreachable(teacher, error) from error


def _refused(teacher: RemoteTeacher, what: str, refusal: Refused) -> RecipeError:
    found = f"a server that refuses {what} with status {refusal.status} ({refusal.message})"
    if refusal.status in (401, 403):
        return _error(
            teacher,
            "api_key_env",
            found,
            "a key that it accepts",
            "name the environment variable that holds the server's key",
        )
    return _error(
        teacher,
        "url",
        found,
        "an OpenAI-compatible server with /models and /completions below this URL",
        "the URL of such servers ends in /v1" if not teacher.url.endswith("/v1") else "",
    )


def _unreachable(teacher: RemoteTeacher, error: Unreachable) -> RecipeError:
    return _error(
        teacher,
        "url",
        f"{teacher.url}, which can't be reached ({error})",
        "a server that answers",
        f"start it (practicum serve or vllm serve {teacher.model} --port …), or correct the URL",
    )


def _error(teacher: RemoteTeacher, key: str, found: str, expected: str, advice: str = "") -> RecipeError:
    return RecipeError(f"teachers.{teacher.name}.{key}", found, expected, advice)
