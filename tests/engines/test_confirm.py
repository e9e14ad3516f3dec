"""An engine whose numbers depend on its batch: turns confirmed alone are the same with any timing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from practicum.engines.protocol import Counter, GenerateRequest, Generation, ScoreRequest
from practicum.engines.torch import confirm
from practicum.engines.torch.sampler import skip_ahead, stream_key, uniforms
from tests.engines.engines import engine_of, prompts, sampling, tiny
from tests.engines.test_batch_invariance import asked_of, talks

FAMILIES = ["qwen3", "gpt2", "qwen3_moe", "qwen2_5_vl"]
WAITS = [[0.0, 0.004, 0.0], [0.001, 0.0, 0.0], [0.0, 0.0, 0.001], [0.004, 0.001, 0.0], [0.0, 0.0, 0.004]]


class Unsteady:
    """A hook of a layer: its result depends on the number of rows that are computed at once."""

    def __init__(self, size: float) -> None:
        self.size = size

    def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * (1 + self.size * (out.shape[-2] // 4 % 5))


@cache
def unsteady(family: str) -> tuple[PreTrainedModel, Unsteady]:
    """A model whose attention sees its batch: a little, for the engine's check of the architecture."""
    model, hook = tiny(family), Unsteady(1e-6)
    ends = ("self_attn.o_proj", "attn.c_proj")
    layers = [m for name, m in model.named_modules() if name.endswith(ends) and "visual" not in name]
    assert layers
    for layer in layers:
        layer.register_forward_hook(hook)
    return model, hook


def made_by(family: str, asked: Sequence[int], size: float, **options: Any) -> tuple[list[Any], int]:
    """What these talks say, side by side, and how often a draft was wrong."""
    model, hook = unsteady(family)
    hook.size = 1e-6
    prompts_of = asked_of(model)
    with engine_of(model, **options) as engine:
        assert not engine.runner.invariant
        hook.size = size
        made = talks(engine, [(i, prompts_of[i]) for i in asked], [WAITS[i] for i in asked])
        return made, engine.stats.redrafted_turns


def same(one: Generation, other: Generation) -> bool:
    parts = [(one.tokens, other.tokens), (one.logprobs, other.logprobs)]
    parts.append((one.plain_logprobs, other.plain_logprobs))
    if one.experts is not None and other.experts is not None:
        parts.append((one.experts, other.experts))
    return one.finish == other.finish and all(torch.equal(a, b) for a, b in parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_confirmed_turns_do_not_depend_on_the_batch_even_where_tokens_do(family: str):
    alone = [made_by(family, [i], 0.05, slots=1, keep_tokens=0)[0][0] for i in range(5)]
    together, wrong = made_by(family, range(5), 0.05, slots=5)
    drafts, _ = made_by(family, range(5), 0.05, slots=5, alone=False)
    turns = [
        (a, b) for one, other in zip(alone, together, strict=True) for a, b in zip(one, other, strict=True)
    ]
    assert all(same(a, b) for a, b in turns)
    assert wrong > 0
    unconfirmed = [(a, b) for x, y in zip(alone, drafts, strict=True) for a, b in zip(x, y, strict=True)]
    assert not all(same(a, b) for a, b in unconfirmed)


@pytest.mark.parametrize("family", FAMILIES)
def test_confirming_changes_nothing_where_numbers_do_not_depend_on_the_batch(
    family: str, monkeypatch: pytest.MonkeyPatch
):
    """Blocks, draws and random numbers are those of decoding, over the edges of blocks too."""
    monkeypatch.setattr(confirm, "FIRST", 16)
    monkeypatch.setattr(confirm, "DRAWN", 8)
    model = tiny(family)
    asked = list(enumerate(asked_of(model)))
    with engine_of(model) as engine:
        expected = talks(engine, asked, WAITS)
    with engine_of(model, alone=True) as engine:
        made = talks(engine, asked, WAITS)
        assert engine.stats.confirmed_turns == 15
        assert engine.stats.redrafted_turns == 0
    assert all(
        same(a, b) for one, other in zip(made, expected, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_a_turn_that_is_wrong_at_its_end_and_one_that_ends_early():
    """Drafts that are wrong everywhere are mended token by token, up to the end that is really drawn."""
    model = tiny()
    request = GenerateRequest(prompts(1)[0], sampling(12), Counter(0, 1))
    with engine_of(model) as engine:
        (expected,) = asyncio.run(_all(engine, [request]))
    with engine_of(model, alone=True) as engine:
        collect = engine.scheduler._collect

        def wrong(memory: Any, sampled: Any) -> Any:
            return collect(memory, sampled._replace(tokens_B=(sampled.tokens_B + 1) % 60))

        engine.scheduler._collect = wrong
        (made,) = asyncio.run(_all(engine, [request]))
        assert engine.stats.redrafted_turns == len(made.tokens) - 1
    assert same(made, expected)


async def _all(engine: Any, requests: Sequence[GenerateRequest]) -> list[Generation]:
    return await asyncio.gather(*map(engine.generate, requests))


def test_scores_do_not_depend_on_what_else_is_scored():
    model, hook = unsteady("qwen3")
    rows = [ScoreRequest(ids, 1) for ids in prompts(6, seed=3, shortest=4)]

    async def score(engine: Any, some: Sequence[ScoreRequest]) -> list[Any]:
        return await asyncio.gather(*map(engine.score, some))

    hook.size = 1e-6
    with engine_of(model) as engine, engine_of(model, alone=False) as other:
        hook.size = 0.05
        alone = [asyncio.run(score(engine, [row]))[0].logprobs for row in rows]
        together = [one.logprobs for one in asyncio.run(score(engine, rows))]
        batched = [one.logprobs for one in asyncio.run(score(other, rows))]
    assert all(map(torch.equal, alone, together))
    assert not all(map(torch.equal, alone, batched))


def test_a_tokens_block_depends_on_its_place_alone():
    longest = confirm.block_edges(9000)
    assert longest[:6] == [64, 128, 256, 512, 1024, 2048]
    for count in (1, 64, 65, 700, 3000, 8999):
        edges = confirm.block_edges(count)
        assert edges == longest[: len(edges)]
        assert count <= edges[-1] < max(65, 2 * count)


def test_a_key_skips_ahead():
    key = stream_key(Counter(1, 2, 3, 4))
    positions = torch.arange(9)
    whole = uniforms(torch.full((9,), key), positions)
    assert torch.equal(uniforms(torch.full((4,), skip_ahead(key, 5)), positions[:4]), whole[5:])
    assert skip_ahead(skip_ahead(key, 7), -7) == key
