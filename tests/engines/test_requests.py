"""Requests that are wrong, cancelled, overtaken by a failure or a close: an error at once, never a hang."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from practicum.engines.protocol import Counter, GenerateRequest, ScoreOptions, ScoreRequest
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError
from practicum.models.load_model import make_model
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.recipe import MakeModel
from tests.engines.engines import engine_of, generate, prompts, sampling, tiny

LONG = sampling(120)


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.mark.parametrize(
    ("prompt", "settings", "says"),
    [
        ([], sampling(), "prompt is empty"),
        ([5, 63], sampling(), "outside of 0 to 62"),
        ([-1], sampling(), "outside of 0 to 62"),
        ([5] * 90, sampling(7), "prompt of 90 tokens and max_new_tokens 7 do not fit .* context of 96"),
        ([5], sampling(0), "max_new_tokens is 0"),
        ([5], sampling(temperature=0.0), "temperature is 0.0, expected above 0 .*greedy"),
        ([5], sampling(top_p=0.0), "top_p is 0.0"),
        ([5], sampling(top_k=-1), "top_k is -1"),
        ([5], sampling(min_p=1.0), "min_p is 1.0"),
    ],
)
def test_a_request_that_can_not_be_met_is_refused(model, prompt, settings, says):
    with engine_of(model) as engine:
        with pytest.raises(EngineError, match=says):
            generate(engine, [(prompt, settings, Counter(0, 0))])
        assert generate(engine, [([5], sampling(), Counter(0, 0))])


@pytest.mark.parametrize(
    ("ids", "start", "top_k", "says"),
    [
        ([], 1, 0, "empty"),
        ([5, 6], 0, 0, "start must be 1 to 2"),
        ([5, 6], 3, 0, "start must be 1 to 2"),
        ([5] * 129, 1, 0, "129 tokens exceeds"),
        ([5, 6], 1, 64, "top_k is 64, expected 0 to 63"),
    ],
)
def test_scores_that_can_not_be_given_are_refused(model, ids, start, top_k, says):
    with engine_of(model) as engine, pytest.raises(EngineError, match=says):
        asyncio.run(engine.score(ScoreRequest(ids, start), ScoreOptions(top_k=top_k)))


@pytest.mark.parametrize(("token", "vocab"), [(63, None), (-1, None), (40, 40)])
def test_a_token_outside_of_the_vocabulary_fails_its_own_score_alone(model, token, vocab):
    async def work(engine: TorchEngine) -> list[Any]:
        rows = ([5, 6, 7], [5, 6, token], [5, 50, 7])  # what stands before may be any token of the model
        asked = (engine.score(ScoreRequest(ids, 2), ScoreOptions(vocab=vocab)) for ids in rows)
        return await asyncio.gather(*asked, return_exceptions=True)

    with engine_of(model) as engine:
        good, bad, other = asyncio.run(work(engine))
        assert isinstance(bad, EngineError)
        assert "outside of 0 to" in str(bad)
        assert len(good.logprobs) == len(other.logprobs) == 1


def test_a_context_beyond_the_model_is_refused(model):
    with pytest.raises(EngineError, match="129 tokens exceeds the model's 128"):
        TorchEngine(model, slots=1, context=129)


def test_a_model_that_was_not_prepared_is_refused():
    raw = make_model(MakeModel(hidden=32, layers=1, heads=2), make_tokenizer(), 0)
    with pytest.raises(EngineError, match="not prepared"):
        TorchEngine(raw, slots=1, context=32)


def test_a_model_with_another_attention_is_refused(model, monkeypatch):
    """Layers that scale attention by something the layout is not told."""
    other = tiny("gpt2")
    attention = other.transformer.h[1].attn  # pyright: ignore
    plain = attention.forward
    monkeypatch.setattr(
        attention,
        "forward",
        lambda *a, **k: plain(*a, **k) if "layout" in k else (2 * plain(*a, **k)[0], None),
    )
    with pytest.raises(EngineError, match="with packed attention differ"):
        TorchEngine(other, slots=1, context=32)


def test_a_cancelled_request_leaves_its_slot_to_the_next(model):
    async def run(engine: TorchEngine) -> list[Any]:
        first = [
            asyncio.create_task(engine.generate(GenerateRequest([5, i], LONG, Counter(0, i))))
            for i in range(2)
        ]
        later = [
            asyncio.create_task(engine.generate(GenerateRequest([6, i], sampling(4), Counter(1, i))))
            for i in range(3)
        ]
        while not engine.stats.decode_steps:
            await asyncio.sleep(0.001)
        first[0].cancel()
        later[1].cancel()
        results = await asyncio.gather(*first, *later, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert isinstance(results[3], asyncio.CancelledError)
        return [results[1], results[2], results[4]]

    with engine_of(model, slots=2, context=124) as engine:
        kept = asyncio.run(run(engine))
        assert engine.idle
        expected = generate(
            engine,
            [
                ([5, 1], LONG, Counter(0, 1)),
                ([6, 0], sampling(4), Counter(1, 0)),
                ([6, 2], sampling(4), Counter(1, 2)),
            ],
        )
    assert [g.tokens.tolist() for g in kept] == [g.tokens.tolist() for g in expected]


def test_cancelling_everything_leaves_an_idle_engine(model):
    async def run(engine: TorchEngine):
        tasks = [
            asyncio.create_task(engine.generate(GenerateRequest(p, LONG, Counter(0, 0))))
            for p in prompts(6, longest=4)
        ]
        while not engine.stats.decode_steps:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        engine.load_weights(model.state_dict().items(), 3)
        return await engine.generate(GenerateRequest([5], sampling(4), Counter(0, 0)))

    with engine_of(model, slots=2, context=128) as engine:
        assert asyncio.run(run(engine)).version_min == 3
        assert engine.idle


def test_an_error_in_a_step_fails_every_request_and_the_engine_goes_on():
    model = tiny(seed=5)
    weight = next(model.parameters())
    good = weight.detach().clone()

    async def run(engine: TorchEngine):
        requests = [engine.generate(GenerateRequest(p, sampling(4), Counter(0, 0))) for p in prompts(9)]
        return await asyncio.gather(*requests, engine.score(ScoreRequest([5, 6], 1)), return_exceptions=True)

    with engine_of(model, slots=2) as engine:
        weight.data.fill_(float("nan"))
        *failed, _ = asyncio.run(run(engine))
        assert len(failed) == 9
        for error in failed:
            assert isinstance(error, EngineError)
            assert "logits are not finite" in str(error)
            assert isinstance(error.__cause__, EngineError)
        weight.data.copy_(good)
        assert all(not isinstance(result, Exception) for result in asyncio.run(run(engine)))


def test_an_unforeseen_error_is_named(model, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("made for this test")

    with engine_of(model) as engine:
        monkeypatch.setattr(engine.runner, "logits", broken)
        with pytest.raises(EngineError, match="made for this test") as caught:
            generate(engine, [([5], sampling(), Counter(0, 0))])
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_closing_fails_what_is_under_way_and_what_comes_later(model):
    async def run(engine: TorchEngine):
        tasks = [
            asyncio.create_task(engine.generate(GenerateRequest(p, LONG, Counter(0, 0))))
            for p in prompts(6, longest=4)
        ]
        while not engine.stats.decode_steps:
            await asyncio.sleep(0.001)
        engine.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        with pytest.raises(EngineError, match="engine is closed"):
            await engine.generate(GenerateRequest([5], sampling(), Counter(0, 0)))

    threads = threading.active_count()
    engine = TorchEngine(model, slots=2, context=128)
    asyncio.run(run(engine))
    engine.close()
    assert threading.active_count() == threads


def test_closing_before_any_step_fails_requests_that_have_not_arrived(model):
    async def run(engine: TorchEngine):
        task = asyncio.create_task(engine.generate(GenerateRequest([5], LONG, Counter(0, 0))))
        await asyncio.sleep(0)
        engine.close()
        with pytest.raises(EngineError, match="was closed with 1 requests in flight"):
            await task

    asyncio.run(run(TorchEngine(model, slots=2, context=128)))


def test_event_loops_of_several_threads_share_an_engine(model):
    results = {}

    def work(index: int):
        results[index] = generate(engine, [([5, 6], sampling(12), Counter(index, i)) for i in range(8)])

    with engine_of(model, slots=6) as engine:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, got in results.items():
            alone = generate(engine, [([5, 6], sampling(12), Counter(index, i)) for i in range(8)])
            assert [g.tokens.tolist() for g in got] == [g.tokens.tolist() for g in alone]
    assert len(results) == 3
