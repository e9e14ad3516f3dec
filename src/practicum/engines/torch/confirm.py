"""A finished turn, computed again alone: the numbers of an engine whose bits depend on its batch.

Where the probe (`ModelRunner.invariant`) fails, what is in the batch shows in the last bits of logprobs, and
now and then in a token. Then the batch only drafts a turn. Here its sequence is computed alone, in blocks of
tokens whose shapes depend on nothing but their place in it, and each token is drawn again with its own random
number. Up to the first token that comes out otherwise, the draft is right; from there on it is drafted again.
So a turn is a function of weights, tokens before it and its counter, whatever the batch was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from practicum.engines.protocol import Finish, Generation
from practicum.engines.torch.kv_memory import ExtendLayout, Extension, KvMemory, PrefillLayout, PromptKv
from practicum.engines.torch.model_runner import ModelRunner, StepInputs, pack, sample_hidden
from practicum.engines.torch.prompt_cache import PromptKey
from practicum.engines.torch.request_queue import GenerateJob
from practicum.engines.torch.sampler import Sampled, skip_ahead, uniforms
from practicum.models.attention import Layout
from practicum.models.load_model import context_length
from practicum.recipe.derived import traits_of

FIRST, MOST, DRAWN = 64, 1024, 64
"""Tokens of the first block and of the longest ones, and those of a block that are drawn at once."""
TOGETHER = 16
"""Sequences whose first blocks are computed in one call, where that does not show in their bits."""

_NO_LIMIT = 2**40
"""Of a sequence's memory: how it grows depends on where a block is, not on how long the sequence is."""
_FirstBlock = tuple[Tensor, Tensor | None, PromptKv]
"""Last hidden states [N, H] of a block, its experts if there are any, and its keys, values and states."""


def confirm(
    runner: ModelRunner, drafts: Sequence[tuple[GenerateJob, Generation]], *, together: bool
) -> Iterator[Generation | None]:
    """Yield each turn with the numbers of its sequence alone, or None if the draft was wrong before its end.

    Then the job asks for the rest of the turn: it is to be drafted again. With `together`, the first blocks
    of several sequences are computed in one call.
    """
    size = TOGETHER if together else 1
    for start in range(0, len(drafts), size):
        several = drafts[start : start + size]
        sequences = [_Sequence.of(job, draft) for job, draft in several]
        for pair, sequence, first in zip(several, sequences, _first_blocks(runner, sequences), strict=True):
            yield _confirm(runner, *pair, sequence, first)


def blocks_are_alike(runner: ModelRunner) -> bool:
    """Return True if a first block has the same numbers computed alone and among others.

    False for experts, whose numbers depend on how many tokens they have, and for models that see pictures,
    whose first blocks have several lengths.
    """
    if runner.sees or traits_of(runner.model.config.to_dict()).moe:
        return False
    ids = torch.arange(TOGETHER * FIRST).mul_(31).remainder_(runner.vocab).view(TOGETHER, FIRST).tolist()
    sequences = [_Sequence(PromptKey(tuple(row)), tuple(row), [FIRST]) for row in ids]
    ((alone, _, alone_kv),) = _first_blocks(runner, sequences[-1:])
    for count in (2, 5, TOGETHER):
        hidden, _, kv = _first_blocks(runner, sequences[-count:])[-1]
        pairs = [(hidden, alone), (kv.keys, alone_kv.keys), (kv.values, alone_kv.values)]
        pairs += [(state, alone_kv.states[name]) for name, state in kv.states.items()]
        if not all(torch.equal(one, other) for one, other in pairs):
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A drafted turn and all before it. Tokens that fill up the last block predict nothing."""

    prompt: PromptKey
    ids: tuple[int, ...]
    edges: list[int]
    """Where blocks end."""
    tokens: Sequence[int] = ()
    """Those of the turn."""

    @classmethod
    def of(cls, job: GenerateJob, draft: Generation) -> _Sequence:
        start = len(job.prompt) - len(job.written)
        prompt = PromptKey.of(job.prompt.ids[:start], job.prompt.images, job.prompt.experts)
        tokens = [*job.written, *draft.tokens.tolist()]
        count = start + len(tokens) - 1  # the last token predicts nothing that was asked for
        edges = block_edges(count)
        ids = (*prompt.ids, *tokens[:-1], *[0] * (edges[-1] - count))
        # Pictures stand in the prompt, and are computed with the first block.
        end = edges[0] if prompt.images is None else block_edges(len(prompt))[-1]
        return cls(prompt, ids, [edge for edge in edges if edge >= end], tokens)

    def key(self, stop: int) -> PromptKey:
        experts = None if self.prompt.experts is None else self.prompt.experts[:stop]
        return PromptKey.of(self.ids[:stop], self.prompt.images, experts)


def _confirm(
    runner: ModelRunner, job: GenerateJob, draft: Generation, sequence: _Sequence, first: _FirstBlock
) -> Generation | None:
    written, prompt, tokens = len(job.written), sequence.prompt, [*sequence.tokens]
    key = skip_ahead(job.key, -written)
    sampled, experts = _compute(runner, job, sequence, first, key)
    drawn = sampled.tokens_B.tolist()
    # From the first token on, sure ones too: of a MoE model, later tokens of a block may show in its bits.
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
        finish=finish,
        experts=None if experts is None else experts[: len(prompt) + count - 1],
    )


def _compute(
    runner: ModelRunner, job: GenerateJob, sequence: _Sequence, block: _FirstBlock, key: int
) -> tuple[Sampled, Tensor | None]:
    """Return what is drawn in the place of each token, on the CPU, and the experts that all inputs took."""
    first = len(sequence.prompt) - 1  # it predicts the turn's first token
    last = first + len(sequence.tokens) - 1
    parts: list[Sampled] = []
    experts: list[Tensor] = []
    for start, hidden_N, experts_N in _blocks(runner, sequence, block):
        if experts_N is not None:
            experts.append(experts_N.cpu())
        for at in range(start, start + len(hidden_N), DRAWN):
            if at > last or at + DRAWN <= first:
                continue
            position_B = torch.arange(at - first, at - first + DRAWN, device=runner.device).clamp_(min=0)
            uniform_B = uniforms(torch.full_like(position_B, key), position_B)
            drawn = sample_hidden(runner, hidden_N[at - start : at - start + DRAWN], job.draw, uniform_B)
            parts.append(Sampled(*(x[max(0, first - at) : last + 1 - at].cpu() for x in drawn)))
    return Sampled(*map(torch.cat, zip(*parts, strict=True))), torch.cat(experts) if experts else None


def _first_blocks(runner: ModelRunner, sequences: Sequence[_Sequence]) -> list[_FirstBlock]:
    """Compute the first blocks of sequences in one call."""
    ends = [sequence.edges[0] for sequence in sequences]
    layout = PrefillLayout(ends, runner.device)
    keys = [sequence.key(end) for sequence, end in zip(sequences, ends, strict=True)]
    hidden_N, experts_N = _routed(runner, pack(runner.model.config, keys, runner.device), layout)
    experts = [None] * len(ends) if experts_N is None else experts_N.split(ends)
    return list(zip(hidden_N.split(ends), experts, layout.prompts(), strict=True))


def _blocks(
    runner: ModelRunner, sequence: _Sequence, first: _FirstBlock
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield where each block begins, its last hidden states [N, H], and its experts if there are any."""
    hidden_N, experts_N, kv = first
    yield 0, hidden_N, experts_N
    if len(sequence.edges) == 1:
        return
    memory = KvMemory(runner.token_kv, 1, _NO_LIMIT)
    memory.put_prompt(kv, 0, 1)
    for start, stop in pairwise(sequence.edges):
        inputs = pack(runner.model.config, [sequence.key(stop)], runner.device, [start])
        layout = ExtendLayout(memory, [Extension(0, start, stop - start)], runner.device)
        yield (start, *_routed(runner, inputs, layout))


def _routed(runner: ModelRunner, inputs: StepInputs, layout: Layout) -> tuple[Tensor, Tensor | None]:
    longest = context_length(runner.model)
    if longest is not None:  # tokens that fill up a block may be beyond the model's last position
        inputs.positions_N.clamp_(max=longest - 1)
    return runner.routed(inputs, layout)


def block_edges(count: int) -> list[int]:
    """Return where blocks end that hold this many tokens: each is as long as all before it."""
    edges = [FIRST]
    while edges[-1] < count:
        edges.append(edges[-1] + min(edges[-1], MOST))
    return edges
