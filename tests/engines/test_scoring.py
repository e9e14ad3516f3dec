"""Scores against a plain forward."""

from __future__ import annotations

import asyncio

import pytest
import torch

from practicum.engines.protocol import (
    Counter,
    GenerateRequest,
    Generation,
    Sampling,
    ScoreOptions,
    ScoreRequest,
    Scores,
)
from practicum.engines.torch import score_batch as scoring
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError
from tests.engines.engines import FAMILIES, engine_of, plain_logprobs, prompts, tiny


def score(engine: TorchEngine, jobs: list[tuple[list[int], int, int]]) -> list[Scores]:
    async def run() -> list[Scores]:
        asked = [(ScoreRequest(ids, start), ScoreOptions(top_k=k)) for ids, start, k in jobs]
        return await asyncio.gather(*(engine.score(*one) for one in asked))

    return asyncio.run(run())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("logits_at_once", [2**22, 200])
@pytest.mark.parametrize("score_tokens", [10_000, 30])
def test_scores_equal_a_plain_forward(family: str, logits_at_once: int, score_tokens: int, monkeypatch):
    monkeypatch.setattr(scoring, "LOGITS_AT_ONCE", logits_at_once)
    model = tiny(family)
    sequences = prompts(12, shortest=2, longest=60)
    jobs = [(ids, 1 + i % (len(ids) - 1), (0, 5, 2)[i % 3]) for i, ids in enumerate(sequences)]
    with engine_of(model, version=4, score_tokens=score_tokens) as engine:
        got = score(engine, jobs)
        assert engine.stats.scored_tokens == sum(len(ids) - start for ids, start, _ in jobs)
    for (ids, start, k), scores in zip(jobs, got, strict=True):
        plain = plain_logprobs(model, ids[:start], torch.tensor(ids[start:]))
        at = torch.tensor(ids[start:]).unsqueeze(-1)
        torch.testing.assert_close(scores.logprobs, plain.gather(-1, at).squeeze(-1), rtol=0, atol=1e-4)
        assert scores.version == 4
        if not k:
            assert scores.topk_ids is None
            assert scores.topk_logprobs is None
            continue
        assert scores.topk_logprobs is not None
        assert scores.topk_ids is not None
        best = plain.topk(k)
        torch.testing.assert_close(scores.topk_logprobs, best.values, rtol=0, atol=1e-4)
        assert torch.equal(scores.topk_ids, best.indices)


def test_given_tokens_are_scored_as_the_most_likely_ones_are():
    model, g = tiny(), torch.Generator().manual_seed(3)
    sequences = prompts(6, shortest=6, longest=30)

    async def run(engine: TorchEngine) -> list[Scores]:
        asked = []
        for i, ids in enumerate(sequences):
            support = torch.randint(0, 40, (len(ids) - 2, 3 + i % 2), generator=g) if i % 3 else None
            options = ScoreOptions(top_k=0 if i % 3 else 4)
            asked.append(engine.score(ScoreRequest(ids, 2, support=support), options))
        return await asyncio.gather(*asked)

    with engine_of(model) as engine:
        got = asyncio.run(run(engine))
        with pytest.raises(EngineError):
            asyncio.run(engine.score(ScoreRequest([1, 2, 3], 1, support=torch.zeros(1, 2).long())))
    for ids, scores in zip(sequences, got, strict=True):
        plain = plain_logprobs(model, ids[:2], torch.tensor(ids[2:]))
        assert scores.topk_ids is not None
        assert scores.topk_logprobs is not None
        expected = plain.gather(-1, scores.topk_ids)
        torch.testing.assert_close(scores.topk_logprobs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("alone", [False, True])
def test_a_sample_comes_with_the_most_likely_tokens_of_its_positions(alone: bool):
    model = tiny()

    async def run(engine: TorchEngine) -> list[Generation]:
        asked = []
        for i, ids in enumerate(prompts(5, shortest=3, longest=12)):
            sampling = Sampling(9, frozenset(), report=(0, 3, 5)[i % 3], temperature=0.7 if i % 2 else 1.0)
            asked.append(engine.generate(GenerateRequest(ids, sampling, Counter(1, i))))
        return await asyncio.gather(*asked)

    with engine_of(model, alone=alone) as engine:
        got = asyncio.run(run(engine))
    for i, (ids, made) in enumerate(zip(prompts(5, shortest=3, longest=12), got, strict=True)):
        if not i % 3:
            assert made.topk_ids is None
            continue
        assert made.topk_ids is not None
        plain = plain_logprobs(model, ids, made.tokens)
        assert torch.equal(made.topk_ids, plain.topk((0, 3, 5)[i % 3]).indices)


def test_no_token_to_score_gives_empty_scores():
    with engine_of(tiny()) as engine:
        plain, top = score(engine, [([5, 6], 2, 0), ([5], 1, 3)])
    assert plain.logprobs.shape == (0,)
    assert plain.topk_ids is None
    assert top.topk_ids is not None
    assert top.topk_ids.shape == (0, 3)


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"hidden": True, "temperature": 0.7}])
def test_a_rows_numbers_do_not_depend_on_its_batch(settings: dict):
    asked = [(ids, 1 + i % 5) for i, ids in enumerate(prompts(24, shortest=8, longest=60))]
    asked += [([*asked[0][0][:8], 7, 9], 8), ([*asked[0][0][:8], 5], 8)]  # that begin alike

    async def run(engine: TorchEngine, jobs: list[tuple[list[int], int]]) -> list[Scores]:
        return await asyncio.gather(
            *(engine.score(ScoreRequest(ids, start), ScoreOptions(**settings)) for ids, start in jobs)
        )

    with engine_of(tiny()) as engine:
        together = asyncio.run(run(engine, asked))
        for job, expected in zip(asked, together, strict=True):
            (alone,) = asyncio.run(run(engine, [job]))
            for name in ("logprobs", "topk_ids", "topk_logprobs", "hidden"):
                mine, theirs = getattr(alone, name), getattr(expected, name)
                assert (mine is None) == (theirs is None)
                assert mine is None or torch.equal(mine, theirs), name


def test_outputs_beyond_the_vocabulary_do_not_count():
    model, ids = tiny(), prompts(1, shortest=9)[0]
    ids = [i % 20 for i in ids]
    with engine_of(model) as engine:
        scores = asyncio.run(engine.score(ScoreRequest(ids, 3), ScoreOptions(top_k=20, vocab=20)))
        with pytest.raises(EngineError, match="expected 0 to 20"):
            asyncio.run(engine.score(ScoreRequest(ids, 3), ScoreOptions(top_k=21, vocab=20)))
    assert scores.topk_ids is not None
    assert scores.topk_logprobs is not None
    assert int(scores.topk_ids.max()) < 20
    torch.testing.assert_close(scores.topk_logprobs.exp().sum(-1), torch.ones(len(ids) - 3))
