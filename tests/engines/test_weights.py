"""Weights come and go: loading by name, sharing with a learner, sleeping."""

from __future__ import annotations

import asyncio
import copy
from typing import Literal

import pytest
import torch

from practicum.engines.protocol import Counter, GenerateRequest, Generation, Memory, ScoreRequest
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError
from practicum.models.fingerprint import fingerprint_ids
from practicum.recipe.counts import KV_POSITIONS
from tests.engines.engines import (
    FAMILIES,
    engine_of,
    generate,
    plain_logprobs,
    prompts,
    resident,
    sampling,
    tiny,
)

REQUESTS = [(p, sampling(12), Counter(0, i)) for i, p in enumerate(prompts(6))]


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.tokens.tolist() for generation in generations]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied_name", [True, False])
def test_loaded_weights_are_sampled_with(family: str, tied_name: bool):
    other = tiny(family, seed=1)
    weights = dict(other.state_dict())
    assert "lm_head.weight" in weights
    if not tied_name:
        del weights["lm_head.weight"]
    with engine_of(other) as engine:
        expected = generate(engine, REQUESTS)
    with engine_of(tiny(family)) as engine:
        before = generate(engine, REQUESTS)
        engine.load_weights(weights.items(), 7)
        got = generate(engine, REQUESTS)
        assert engine.version == 7
    assert tokens(got) == tokens(expected) != tokens(before)
    assert {(g.version_min, g.version_max) for g in before} == {(0, 0)}
    assert {(g.version_min, g.version_max) for g in got} == {(7, 7)}


def test_shared_weights_cost_nothing_and_follow_the_learner():
    model = tiny()
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    versions = [parameter._version for parameter in model.parameters()]
    with engine_of(model) as engine:
        before = generate(engine, REQUESTS)
        engine.load_weights(model.named_parameters(), 1)
        assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
        assert [parameter._version for parameter in model.parameters()] == versions
        assert tokens(generate(engine, REQUESTS)) == tokens(before)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        engine.load_weights(model.named_parameters(), 2)
        after = generate(engine, REQUESTS)
    assert tokens(after) != tokens(before)
    assert after[0].version_min == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("model.norm.weight"), r"1 missing \(model.norm.weight\)"),
        (lambda w: w.update(extra=torch.zeros(1)), r"1 unknown \(extra\)"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(47)}),
            r"model.norm.weight is \(47,\), expected \(48,\)",
        ),
        (
            lambda w: w.update({"lm_head.weight": w["lm_head.weight"] + 1}),
            "one tied weight .* different values",
        ),
    ],
    ids=["missing", "unknown", "shape", "untied"],
)
def test_weights_that_do_not_fit_change_nothing(change, says: str):
    model = tiny()
    weights = dict(tiny(seed=1).state_dict())
    change(weights)
    before = copy.deepcopy(model.state_dict())
    with engine_of(model, version=3) as engine:
        with pytest.raises(EngineError, match=says):
            engine.load_weights(weights.items(), 4)
        assert engine.version == 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_weights_of_another_number_type_are_converted():
    exact = tiny(seed=1, dtype=torch.float64)
    model = tiny()
    with engine_of(model) as engine:
        engine.load_weights(exact.state_dict().items(), 1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, exact.state_dict()[name].float())


@pytest.mark.parametrize("what", ["load", "sleep"])
def test_nothing_changes_under_requests_on_their_way(what: str):
    model = tiny()

    async def run(engine: TorchEngine):
        tasks = [asyncio.create_task(engine.generate(GenerateRequest(*request))) for request in REQUESTS]
        await asyncio.sleep(0)
        changes = {"load": lambda: engine.load_weights(model.state_dict().items(), 1), "sleep": engine.sleep}
        with pytest.raises(EngineError, match="6 requests in flight"):
            changes[what]()
        return await asyncio.gather(*tasks)

    with engine_of(model, slots=2) as engine:
        assert {g.version_max for g in asyncio.run(run(engine))} == {0}


@pytest.mark.parametrize("aside", ["disk", "host", None])
def test_sleep_frees_what_it_says_and_wake_restores_every_bit(aside: Literal["disk", "host"] | None):
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    size = sum(parameter.nbytes for parameter in model.parameters())
    with engine_of(model, owns_weights=aside is not None) as engine:
        expected = generate(engine, REQUESTS)
        held = engine.memory()
        assert held.weights >= size
        assert held.kv == 2 * 2 * 16 * 2 * KV_POSITIONS * 12 * 4
        freed = engine.sleep()
        if aside is not None:
            freed = Memory(engine.offload(aside).weights, freed.kv)
        left = engine.memory()
        assert (left.weights + freed.weights, left.kv + freed.kv) == (held.weights, held.kv)
        assert freed.kv == held.kv
        assert freed.weights == (size if aside == "disk" else 0)  # a CPU's memory is the host's
        with pytest.raises(EngineError, match="sleeps"):
            generate(engine, REQUESTS[:1])
        with pytest.raises(EngineError, match="sleeps"):
            asyncio.run(engine.score(ScoreRequest([5, 6], 1)))
        with pytest.raises(EngineError, match="sleeps"):
            engine.sleep()
        engine.wake()
        engine.wake()
        assert engine.memory() == held
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])
        assert tokens(generate(engine, REQUESTS)) == tokens(expected)


def test_weights_put_aside_can_not_be_used_or_loaded():
    model = tiny()
    weights = copy.deepcopy(model.state_dict())
    with engine_of(model, owns_weights=True) as engine:
        with pytest.raises(EngineError, match="only a sleeping engine"):
            engine.offload("disk")
        engine.sleep()
        engine.offload("host")
        engine.offload("disk")
        for use in (engine.fingerprint, lambda: engine.load_weights(weights.items(), 1)):
            with pytest.raises(EngineError, match="wake it"):
                use()
    with engine_of(tiny()) as engine:
        engine.sleep()
        engine.load_weights(weights.items(), 1)
        assert engine.fingerprint().isfinite().all()


def test_sleep_returns_memory_to_the_system():
    model = tiny()
    with engine_of(model, slots=512, context=128, owns_weights=True) as engine:
        scheduler = engine.scheduler
        assert scheduler.memory is not None
        scheduler.memory.keys.fill_(1.0)
        scheduler.memory.values.fill_(1.0)
        held = resident()
        freed = engine.sleep()
        assert freed.kv > 2**23
        assert held - resident() > 0.9 * freed.kv


@pytest.mark.parametrize("family", FAMILIES)
def test_fingerprint_is_the_models_and_tells_weights_apart(family: str):
    model = tiny(family)
    ids = fingerprint_ids(model.config.vocab_size)
    expected = plain_logprobs(model, ids[:1], torch.tensor(ids[1:]))
    expected = expected.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
    with engine_of(model) as engine:
        first = engine.fingerprint()
        engine.load_weights(tiny(family, seed=1).state_dict().items(), 1)
        second = engine.fingerprint()
    assert first.dtype == torch.float32
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-4)
    assert float((first - second).abs().max()) > 0.1


def test_weights_that_find_no_room_on_disk_stay_where_they_are(monkeypatch: pytest.MonkeyPatch):
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    model = tiny()
    with engine_of(model, owns_weights=True) as engine:
        expected = engine.fingerprint()
        engine.sleep()
        with monkeypatch.context() as patch:
            patch.setattr("practicum.models.offloaded_weights.tensor_bytes", full_disk)
            with pytest.raises(EngineError, match="No space left on device; set TMPDIR"):
                engine.offload("disk")
        engine.wake()
        assert torch.equal(engine.fingerprint(), expected)
