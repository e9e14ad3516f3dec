"""The torch engine with mixture-of-experts models: samples, scores, and the experts that tokens took."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.engines.protocol import Counter, GenerateRequest, Generation, ScoreRequest
from practicum.engines.shared_memory import shared_weights
from practicum.errors import EngineError
from practicum.learning.parallel import whole_tensors
from practicum.models.experts import routes_of
from practicum.models.lora import merged_weights
from practicum.sessions.session import EnginePolicy, Trajectory
from tests.engines.engines import engine_of, generate, plain_forward, plain_logprobs, prompts, sampling, tiny
from tests.models.families import tiny_family

EOS = 1


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("qwen3_moe")


def plain_experts(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Experts [N, L, E] that a plain forward of the whole sequence takes."""
    routes = routes_of(model)
    assert routes is not None
    with routes.record() as taken:
        plain_forward(model, ids)
    return taken.tensor()


def check_experts(model: PreTrainedModel, prompt: list[int], made: Generation) -> None:
    """Recorded experts are those of a plain forward; the last sampled token was no input."""
    assert made.experts is not None
    expected = plain_experts(model, [*prompt, *made.tokens.tolist()])[:-1]
    assert made.experts.dtype == torch.int64
    assert made.experts.shape == expected.shape
    assert torch.equal(made.experts.sort(-1).values, expected.sort(-1).values)


def test_greedy_tokens_equal_transformers_own(model: PreTrainedModel):
    asked = prompts(6)
    with engine_of(model) as engine:
        assert engine.runner.lean is None
        request = sampling(16, stop=(EOS,), greedy=True)
        made = generate(engine, [(prompt, request, Counter(0, i)) for i, prompt in enumerate(asked)])
    for prompt, got in zip(asked, made, strict=True):
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)  # pyright: ignore
        assert got.tokens.tolist() == out[0, len(prompt) :].tolist()


def test_logprobs_and_experts_equal_a_plain_forward_of_the_whole_sequence(model: PreTrainedModel):
    # Fewer slots than requests, and answers of unequal lengths: rows move and prompts are kept for later.
    asked = [prompt for prompt in prompts(5) for _ in range(3)]
    with engine_of(model, slots=4) as engine:
        lengths = [1 + 5 * i % 13 for i in range(len(asked))]
        requests = [
            (p, sampling(n), Counter(0, i)) for i, (p, n) in enumerate(zip(asked, lengths, strict=True))
        ]
        made = generate(engine, requests)
        assert engine.stats.prefilled_prompts == 5
    for prompt, got in zip(asked, made, strict=True):
        all_RV = plain_logprobs(model, prompt, got.tokens)
        expected = all_RV.gather(1, got.tokens.unsqueeze(1)).squeeze(1)
        assert torch.allclose(got.plain_logprobs, expected, atol=1e-5)
        check_experts(model, prompt, got)


def test_scores_equal_a_plain_forward(model: PreTrainedModel):
    asked = prompts(4, shortest=4)

    async def run() -> list[Tensor]:
        with engine_of(model) as engine:
            return [
                scores.logprobs
                for scores in await asyncio.gather(*(engine.score(ScoreRequest(p, 2)) for p in asked))
            ]

    for ids, got in zip(asked, asyncio.run(run()), strict=True):
        expected = plain_logprobs(model, ids[:2], torch.tensor(ids[2:]))
        assert torch.allclose(
            got, expected.gather(1, torch.tensor(ids[2:]).unsqueeze(1)).squeeze(1), atol=1e-5
        )


def test_new_weights_are_routed_anew(model: PreTrainedModel):
    other, fresh = tiny("qwen3_moe", seed=1), tiny("qwen3_moe")
    with engine_of(fresh) as engine:
        engine.load_weights(other.state_dict().items(), 1)
        (got,) = generate(engine, [([5, 6, 7, 8], sampling(12), Counter(0, 0))])
    check_experts(other, [5, 6, 7, 8], got)
    with pytest.raises(AssertionError):
        check_experts(model, [5, 6, 7, 8], got)


def other_experts(made: Generation) -> Tensor:
    """For each token two experts that it did not take."""
    assert made.experts is not None
    return torch.stack([made.experts.max(-1).values + 1, made.experts.max(-1).values + 2], -1) % 8


def test_a_later_turn_takes_the_experts_that_its_tokens_took_before(model: PreTrainedModel):
    """Else a near tie sends them to others when they are computed again, and no replay fits all turns."""
    prompt, routes = [5, 6, 7, 8, 9], routes_of(model)
    assert routes is not None
    with engine_of(model) as engine:
        (first,) = generate(engine, [(prompt, sampling(4), Counter(0, 0))])
        known = other_experts(first)
        trajectory = Trajectory([*prompt, *first.tokens.tolist(), 11, 12], experts=known)

        async def ask() -> list[Generation]:
            session: Any = None  # an engine's turns depend on the trajectory alone
            turn = EnginePolicy(engine).next(trajectory, sampling(6), Counter(0, 1), session)
            return list(
                await asyncio.gather(
                    turn, engine.generate(GenerateRequest(trajectory.ids(), sampling(6), Counter(0, 1)))
                )
            )

        before = engine.stats.prefilled_prompts
        got, own = asyncio.run(ask())
        assert engine.stats.prefilled_prompts - before == 2
    assert got.experts is not None
    assert own.experts is not None
    assert torch.equal(got.experts[: len(known)], known)
    assert not torch.equal(own.experts[: len(known)], known)
    with routes.replay(torch.cat([got.experts, got.experts[-1:]])):
        all_RV = plain_logprobs(model, trajectory.ids(), got.tokens)
    expected = all_RV.gather(1, got.tokens.unsqueeze(1)).squeeze(1)
    assert torch.allclose(got.plain_logprobs, expected, atol=1e-5)


def test_experts_that_do_not_fit_the_prompt_are_refused(model: PreTrainedModel):
    with engine_of(model) as engine:
        for shape in ((3, 2, 2), (2, 3, 2), (2, 2, 1)):
            with pytest.raises(EngineError, match="do not fit a prompt of 2 tokens"):
                asyncio.run(
                    engine.generate(
                        GenerateRequest([5, 6], sampling(1), Counter(0, 0), experts=torch.zeros(shape).long())
                    )
                )


def test_double_precision_samples_and_records():
    model = tiny("qwen3_moe", dtype=torch.float64)
    with engine_of(model) as engine:
        (got,) = generate(engine, [([5, 6, 7], sampling(6), Counter(0, 0))])
    check_experts(model, [5, 6, 7], got)


@pytest.mark.parametrize("source", [whole_tensors, merged_weights])
@pytest.mark.parametrize("shared", [False, True])
def test_a_correction_bias_arrives_with_the_weights(source: Any, shared: bool):
    learner, sampler = tiny_family("deepseek_v3"), tiny_family("deepseek_v3")
    biases = {name for name, _ in learner.named_buffers() if name.endswith("e_score_correction_bias")}
    with torch.no_grad():
        for name, buffer in learner.named_buffers():
            if name in biases:
                buffer.copy_(torch.tensor([5.0, -5.0] * 4))
    with engine_of(sampler) as engine, shared_weights(source(learner)) as weights:
        before = engine.fingerprint()
        engine.load_weights(weights if shared else source(learner), 1)
        after = engine.fingerprint()
    found = dict(sampler.named_buffers())
    assert biases
    assert all(torch.equal(found[name], buffer) for name, buffer in learner.named_buffers() if name in biases)
    assert not torch.allclose(before, after, atol=1e-3)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "granitemoe"])
def test_experts_of_every_known_router_are_recorded_and_taken_again(family: str):
    model = tiny_family(family)
    with engine_of(model) as engine:
        made = generate(engine, [([5, 9, 14, 3], sampling(8), Counter(0, i)) for i in range(3)])
    for one in made:
        check_experts(model, [5, 9, 14, 3], one)
