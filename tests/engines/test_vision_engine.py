"""The torch engine with vision models: pictures in prompts, with and without others beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.engines.protocol import Counter, GenerateRequest, Generation, Sampling, ScoreRequest, Scores
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError
from practicum.models.vision import Images
from tests.engines.engines import (
    engine_of,
    picture_prompt,
    pictures,
    plain_forward,
    plain_inputs,
    sampling,
    tiny,
)

EOS = 1
SIZES = [(), ((2, 3),), ((1, 4), (3, 2)), ((4, 4),), (), ((1, 1), (2, 2))]
Row = tuple[list[int], Images | None]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("qwen2_5_vl")


@pytest.fixture(scope="module")
def rows(model: PreTrainedModel) -> list[Row]:
    """Prompts with no, one and two pictures of various sizes."""
    return [
        (picture_prompt(model, *sizes, seed=seed), pictures(model, *sizes, seed=seed) if sizes else None)
        for seed, sizes in enumerate(SIZES)
    ]


def sample(engine: TorchEngine, rows: Sequence[Row], how: Sampling) -> list[Generation]:
    """All rows at once."""

    async def run() -> list[Generation]:
        return await asyncio.gather(
            *(
                engine.generate(GenerateRequest(ids, how, Counter(0, i), images=images))
                for i, (ids, images) in enumerate(rows)
            )
        )

    return asyncio.run(run())


def score(engine: TorchEngine, rows: Sequence[Row], starts: Sequence[int]) -> list[Scores]:
    async def run() -> list[Scores]:
        return await asyncio.gather(
            *(
                engine.score(ScoreRequest(ids, start, images=images))
                for (ids, images), start in zip(rows, starts, strict=True)
            )
        )

    return asyncio.run(run())


def expected_logprobs(model: PreTrainedModel, row: Row, tokens: Tensor) -> Tensor:
    """Of tokens behind a prompt, by a plain forward of the whole sequence."""
    ids, images = row
    logits = plain_forward(model, [*ids, *tokens.tolist()], images)[len(ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)


def test_greedy_tokens_equal_transformers_own(model: PreTrainedModel, rows: list[Row]):
    with engine_of(model) as engine:
        made = sample(engine, rows, sampling(16, stop=(EOS,), greedy=True))
    for (ids, images), got in zip(rows, made, strict=True):
        inputs = plain_inputs(model, ids, images)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=16)  # pyright: ignore
        assert got.tokens.tolist() == out[0, len(ids) :].tolist()


def test_logprobs_equal_a_plain_forward_of_the_whole_sequence(model: PreTrainedModel, rows: list[Row]):
    with engine_of(model, slots=4) as engine:
        made = sample(engine, rows + rows, sampling(12))
        assert engine.stats.prefilled_prompts == len(rows)
    for row, got in zip(rows + rows, made, strict=True):
        if model.config.image_token_id in got.tokens:  # which transformers' forward would take for a picture
            continue
        assert torch.allclose(got.plain_logprobs, expected_logprobs(model, row, got.tokens), atol=1e-5)
        assert got.experts is None


def test_equal_tokens_with_other_pictures_share_nothing(model: PreTrainedModel):
    ids = picture_prompt(model, (2, 2))
    asked: list[Row] = [(ids, pictures(model, (2, 2), seed=seed)) for seed in (0, 1, 0)]
    with engine_of(model) as engine:
        made = sample(engine, asked, sampling(6, greedy=True))
        assert engine.stats.prefilled_prompts == 2
        scores = score(engine, [([*ids, 9, 11], images) for _, images in asked], [len(ids)] * 3)
    assert torch.equal(made[0].plain_logprobs, made[2].plain_logprobs)
    assert not torch.allclose(made[0].plain_logprobs[0], made[1].plain_logprobs[0], atol=1e-3)
    for row, got in zip(asked, scores, strict=True):
        assert torch.allclose(got.logprobs, expected_logprobs(model, row, torch.tensor([9, 11])), atol=1e-5)


def test_scores_equal_a_plain_forward(model: PreTrainedModel, rows: list[Row]):
    tail = [9, 11, 30, 7]
    asked: list[Row] = [([*ids, *tail], images) for ids, images in rows]
    with engine_of(model) as engine:
        scores = score(engine, asked, [len(ids) for ids, _ in rows])
        alone = score(engine, asked[2:3], [len(rows[2][0])])
    for row, got in zip(rows, scores, strict=True):
        assert torch.allclose(got.logprobs, expected_logprobs(model, row, torch.tensor(tail)), atol=1e-5)
    assert torch.allclose(alone[0].logprobs, scores[2].logprobs, atol=1e-5)


def test_a_later_turn_goes_on_where_the_earlier_one_ended(model: PreTrainedModel, rows: list[Row]):
    ids, images = rows[2]
    with engine_of(model) as engine:
        (whole,) = sample(engine, [(ids, images)], sampling(8, greedy=True))
        (rest,) = sample(engine, [([*ids, *whole.tokens[:5].tolist()], images)], sampling(3, greedy=True))
    assert rest.tokens.tolist() == whole.tokens[5:].tolist()
    assert torch.allclose(rest.plain_logprobs, whole.plain_logprobs[5:], atol=1e-5)


def test_an_image_token_that_was_sampled_is_a_plain_token(model: PreTrainedModel, rows: list[Row]):
    """Its logprobs do not depend on whether it was decoded, given or scored, nor on who is beside it."""
    ids, images = rows[1]
    token = model.config.image_token_id
    later = ([*ids, 9, token, 11], images)
    with engine_of(model) as engine:
        first, _ = sample(engine, [later, rows[2]], sampling(4, greedy=True))
        whole = [*later[0], *first.tokens.tolist()]
        (scored,) = score(engine, [(whole, images)], [len(ids)])
    assert torch.allclose(scored.logprobs[3:], first.plain_logprobs, atol=1e-5)


def test_pictures_that_do_not_fit_fail_alone(model: PreTrainedModel, rows: list[Row]):
    ids, _ = rows[1]
    with engine_of(model) as engine:

        async def run() -> list[Generation | BaseException]:
            asked = [(ids, pictures(model, (9, 9))), rows[1]]
            return await asyncio.gather(
                *(
                    engine.generate(GenerateRequest(i, sampling(2), Counter(0, 0), images=images))
                    for i, images in asked
                ),
                return_exceptions=True,
            )

        bad, good = asyncio.run(run())
        assert isinstance(bad, EngineError)
        assert isinstance(good, Generation)
        with pytest.raises(EngineError, match="each image needs its own run"):
            score(engine, [rows[1]], [5])
    with engine_of(tiny()) as engine, pytest.raises(EngineError, match="takes no images"):
        sample(engine, [([5, 6], rows[1][1])], sampling(2))
