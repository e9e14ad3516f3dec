"""Recompute finished turns alone, for engines whose numbers depend on the batch in their last bits.

If the probe (`ModelRunner.invariant`) fails, the batch changes the last bits of logprobs, and sometimes a
token. Then batched decoding only drafts a turn. This module computes its sequence alone, in blocks whose
shapes depend only on their position, and draws each token again with its random number. The draft is accepted
up to the first token that differs, and the rest is drafted again. So a turn depends only on weights, earlier
tokens and its counter, not on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from practicum.engines.protocol import Finish, Generation
from practicum.engines.torch.kv_memory import ExtendLayout, Extension, KvMemory, PrefillLayout
from practicum.engines.torch.model_runner import ModelRunner, StepInputs, pack, sample_hidden
from practicum.engines.torch.prompt_cache import PromptKey
from practicum.engines.torch.request_queue import GenerateJob
from practicum.engines.torch.sampler import Sampled, skip_ahead, uniforms
from practicum.models.attention import Layout
from practicum.models.load_model import context_length

FIRST, MOST, DRAWN = 64, 1024, 64
"""Tokens of the first and of the longest blocks, and the tokens of a block drawn per call."""

_NO_LIMIT = 2**40
"""Growth step of a sequence's memory, which depends on a block's position and not on the sequence length."""


def confirm(runner: ModelRunner, job: GenerateJob, draft: Generation) -> Generation | None:
    """Return the turn with the numbers of its sequence alone, or None if the draft was rejected before its
    end.

    In this case, the job is changed to request the rest of the turn.
    """
    written = len(job.written)
    start, key = len(job.prompt) - written, skip_ahead(job.key, -written)
    tokens = [*job.written, *draft.tokens.tolist()]
    prompt = PromptKey.of(job.prompt.ids[:start], job.prompt.images, job.prompt.experts)
    sampled, experts = _compute(runner, job, prompt, tokens, key)
    drawn = sampled.tokens_B.tolist()
    # Start at the first token: in MoE models, later tokens of a block may change earlier bits.
    wrong = next((i for i, token in enumerate(tokens) if drawn[i] != token), None)
    finish: Finish = draft.finish
    if wrong is not None:
        tokens = [*tokens[:wrong], drawn[wrong]]
        left = job.sampling.max_new_tokens + written - len(tokens)
        if drawn[wrong] not in job.sampling.stop and left > 0:
            job.prompt = PromptKey.of((*prompt.ids, *tokens), prompt.images, prompt.experts)
            job.sampling = replace(job.sampling, max_new_tokens=left)
            job.key, job.written = skip_ahead(key, len(tokens)), tuple(tokens)
            return None
        finish = "stop" if drawn[wrong] in job.sampling.stop else "length"
    count = len(tokens)
    return replace(
        draft,
        tokens=torch.tensor(tokens),
        logprobs=sampled.logprobs_B[:count].float(),
        plain_logprobs=sampled.plain_B[:count].float(),
        topk_ids=sampled.top_BK[:count] if draft.topk_ids is not None else None,
        finish=finish,
        experts=None if experts is None else experts[: start + count - 1],
    )


def _compute(
    runner: ModelRunner, job: GenerateJob, prompt: PromptKey, tokens: Sequence[int], key: int
) -> tuple[Sampled, Tensor | None]:
    """Return the token drawn at each position, on the CPU, and the experts of all inputs."""
    first = len(prompt) - 1  # it predicts the turn's first token
    last = first + len(tokens) - 1
    parts: list[Sampled] = []
    experts: list[Tensor] = []
    for start, hidden_N, experts_N in _blocks(runner, prompt, tokens):
        if experts_N is not None:
            experts.append(experts_N.cpu())
        for at in range(start, start + len(hidden_N), DRAWN):
            if at > last or at + DRAWN <= first:
                continue
            position_B = torch.arange(at - first, at - first + DRAWN, device=runner.device).clamp_(min=0)
            uniform_B = uniforms(torch.full_like(position_B, key), position_B)
            hidden = hidden_N[at - start : at - start + DRAWN]
            row_B = torch.arange(DRAWN, device=runner.device)
            drawn = sample_hidden(runner, hidden, job.draw, uniform_B, row_B)
            parts.append(Sampled(*(x[max(0, first - at) : last + 1 - at].cpu() for x in drawn)))
    return Sampled(*map(torch.cat, zip(*parts, strict=True))), torch.cat(experts) if experts else None


def _blocks(
    runner: ModelRunner, prompt: PromptKey, tokens: Sequence[int]
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield the start of each block, its last hidden states [N, H], and its experts, if any."""
    inputs_of_turn = tokens[:-1]  # the last token predicts no token of the turn
    count = len(prompt) + len(inputs_of_turn)
    edges = block_edges(count)
    filled = edges[-1]
    ids = (*prompt.ids, *inputs_of_turn, *[0] * (filled - count))
    # Images are in the prompt, and computed with the first block.
    end = edges[0] if prompt.images is None else block_edges(len(prompt))[-1]
    config, device = runner.model.config, runner.device
    longest = context_length(runner.model)

    def key(stop: int) -> PromptKey:
        experts = None if prompt.experts is None else prompt.experts[:stop]
        return PromptKey.of(ids[:stop], prompt.images, experts)

    def compute(inputs: StepInputs, layout: Layout) -> tuple[Tensor, Tensor | None]:
        if longest is not None:  # padding of a block may exceed the model's maximum position
            inputs.positions_N.clamp_(max=longest - 1)
        return runner.routed(inputs, layout)

    layout = PrefillLayout([end], device)
    yield (0, *compute(pack(config, [key(end)], device), layout))
    if end == filled:
        return
    memory = KvMemory(runner.token_kv, 1, _NO_LIMIT)
    memory.put_prompt(layout.prompts()[0], 0, 1)
    for start, stop in pairwise(edge for edge in edges if edge >= end):
        inputs = pack(config, [key(stop)], device, [start])
        yield (start, *compute(inputs, ExtendLayout(memory, [Extension(0, start, stop - start)], device)))


def block_edges(count: int) -> list[int]:
    """Return the ends of blocks for `count` tokens. Each block is as long as all before it."""
    edges = [FIRST]
    while edges[-1] < count:
        edges.append(edges[-1] + min(edges[-1], MOST))
    return edges
