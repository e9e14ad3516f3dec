"""Families whose layers carry a state: learner and engine give the plain model's numbers."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from practicum.dataplane.ragged import Ragged
from practicum.engines.protocol import Counter, GenerateRequest, ScoreRequest
from practicum.engines.torch.model_runner import ModelRunner
from practicum.engines.torch.request_queue import ScoreJob
from practicum.engines.torch.score_batch import score_batch
from practicum.errors import EngineError
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import RowSpans
from practicum.models.adapter_files import SavedAdapter, write_adapter
from practicum.models.experts import routes_of
from practicum.models.load_model import ready
from practicum.models.lora import add_adapter, base_fingerprint, put_adapters
from practicum.models.offloaded_weights import named_tensors
from practicum.models.state_layers import seam_of, unknown_layers
from practicum.recipe.schema.recipe import Lora, Train
from tests.engines.engines import engine_of, generate, plain_forward, plain_logprobs, sampling
from tests.models.families import DENSE, REFUSED, STATE, tiny_family

model_of = cache(tiny_family)
IDS = torch.randint(3, 64, (90,), generator=torch.Generator().manual_seed(1))
IDS[62:74] = IDS[:12]
# Four responses share the first prompt, and the last of them more; two share another. The lengths of the
# other rows are too different for one call.
ROWS = [(0, 9, 30), (0, 9, 10), (0, 9, 12), (20, 27, 60), (20, 27, 33), (62, 71, 88)]
ROWS += [(40, 41, 43), (80, 82, 84), (3, 12, 50)]


def packed_rows() -> Any:
    prompts, responses = ([IDS[a:b] for a, b in spans] for spans in zip(*_spans(), strict=True))
    return RowSpans(Ragged.from_rows(prompts), Ragged.from_rows(responses)).pack(range(len(ROWS)))


def _spans() -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [((start, middle), (middle, end)) for start, middle, end in ROWS]


def plain_hidden(model: PreTrainedModel) -> torch.Tensor:
    parts = []
    for start, middle, end in ROWS:
        out = model.base_model(input_ids=IDS[start : end - 1].unsqueeze(0), use_cache=False)
        parts.append(out.last_hidden_state[0, middle - start - 1 :])
    return torch.cat(parts)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", STATE)
def test_hidden_states_and_gradients_are_the_plain_models(name: str, recompute: bool):
    model = model_of(name)
    trunk, packed = PackedModel(model, Train(gradient_checkpointing=recompute)), packed_rows()
    weights: torch.Tensor | None = None
    gradients, hidden = [], []
    for mine in (True, False):
        model.zero_grad()
        with trunk.training():
            hidden_M = trunk.hidden(packed) if mine else plain_hidden(model)
            if weights is None:
                weights = torch.randn(hidden_M.shape, generator=torch.Generator().manual_seed(2))
            loss = (hidden_M * weights).sum()
            trunk.backward(loss, packed) if mine else loss.backward()
        hidden.append(hidden_M.detach())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    model.gradient_checkpointing_disable()
    torch.testing.assert_close(*hidden, rtol=1e-3, atol=1e-3)
    for parameter, expected in gradients[1].items():
        largest = float(expected.abs().max())
        torch.testing.assert_close(gradients[0][parameter], expected, rtol=1e-2, atol=1e-3 * largest + 1e-5)


@pytest.mark.parametrize("name", STATE)
def test_the_engine_samples_and_scores_with_the_plain_models_logprobs(name: str):
    model = model_of(name)
    prompts = [IDS[a:b].tolist() for a, b in ((0, 2), (5, 16), (30, 34), (5, 16), (2, 3))]
    with engine_of(model, slots=3) as engine:
        made = generate(engine, [(ids, sampling(12), Counter(0, i)) for i, ids in enumerate(prompts)])
        scored = [
            asyncio.run(engine.score(ScoreRequest([*ids, *one.tokens.tolist()], len(ids)))).logprobs
            for ids, one in zip(prompts, made, strict=True)
        ]
    for ids, one, scores in zip(prompts, made, scored, strict=True):
        theirs = plain_logprobs(model, ids, one.tokens).gather(1, one.tokens.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(one.plain_logprobs, theirs, rtol=0, atol=1e-3)
        torch.testing.assert_close(scores, theirs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", STATE)
@pytest.mark.parametrize("alone", [False, True])
def test_kept_turns_forks_and_sleep_leave_states_right(name: str, alone: bool):
    model = model_of(name)
    routed = routes_of(model) is not None
    with engine_of(model, slots=4, alone=alone) as engine:

        def turn(ids: list[int], number: int, known: Any) -> Any:
            request = GenerateRequest(ids, sampling(5), Counter(0, number), experts=known, keep=True)
            return asyncio.run(engine.generate(request))

        first = turn(IDS[:7].tolist(), 0, None)
        ids = [*IDS[:7].tolist(), *first.tokens.tolist(), 9, 8, 7]
        known = first.experts if routed else None

        async def fork() -> Any:
            requests = (
                GenerateRequest(ids, sampling(6), Counter(0, n), experts=known, keep=True) for n in (1, 2)
            )
            return await asyncio.gather(*map(engine.generate, requests))

        forks = asyncio.run(fork())
        reused = engine.stats.reused_tokens
        engine.sleep()
        engine.wake()
        again = turn(IDS[:7].tolist(), 0, None)
    assert reused > 0
    assert torch.equal(again.tokens, first.tokens)
    for one in forks:
        theirs = plain_logprobs(model, ids, one.tokens).gather(1, one.tokens.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(one.plain_logprobs, theirs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", STATE)
def test_engine_and_learner_run_bfloat16(name: str):
    """Some of these families return float32 logits of a bfloat16 model."""
    model = ready(tiny_family(name, prepared=False).bfloat16(), torch.device("cpu"))
    PackedModel(model, Train())
    with engine_of(model) as engine:
        (made,) = generate(engine, [(IDS[:5].tolist(), sampling(4), Counter(0, 0))])
    assert torch.isfinite(made.plain_logprobs).all()


def test_rows_of_several_adapters_are_scored_as_by_each_alone(tmp_path: Path):
    adapters = {}
    for seed, name in enumerate(("a", "b")):
        adapted = tiny_family("qwen3_5_text", prepared=False)
        add_adapter(adapted, Lora(rank=2), seed)
        with torch.no_grad():
            for parameter_name, parameter in adapted.named_parameters():
                if ".lora_B." in parameter_name:
                    parameter.normal_(std=0.3)
        assert any("linear_attn" in n for n in named_tensors(adapted))
        write_adapter(folder := tmp_path / name, adapted, named_tensors(adapted), base_fingerprint(adapted))
        adapters[name] = SavedAdapter.read(str(folder), "teachers.t.adapter")
    model = tiny_family("qwen3_5_text")
    put_adapters(model, adapters, "the base")
    jobs = [
        ScoreJob(ScoreRequest(IDS[i : 30 + i].tolist(), 9, adapter=name))
        for i, name in enumerate(("a", None, "b", "a"))
    ]
    runner = ModelRunner(model)
    with torch.no_grad():
        together = score_batch(runner, jobs, 0)
        apart = [score_batch(runner, [job], 0)[0] for job in jobs]
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-4)
    base = plain_logprobs(model, IDS[:9].tolist(), IDS[9:30]).gather(1, IDS[9:30].unsqueeze(1)).squeeze(1)
    assert not torch.allclose(together[0].logprobs, base, atol=1e-2)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "lfm2", "mamba"])
def test_samples_do_not_depend_on_their_batch(name: str):
    model = model_of(name)
    requests = [(IDS[i : i + 3 + i].tolist(), sampling(20), Counter(0, i)) for i in range(5)]
    with engine_of(model) as engine:
        together = generate(engine, requests)
        apart = [generate(engine, [request])[0] for request in requests]
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.logprobs, other.logprobs)


def test_a_plain_forward_is_the_familys_own():
    model = model_of("lfm2")
    before = plain_forward(tiny_family("lfm2", prepared=False), IDS.tolist())
    torch.testing.assert_close(plain_forward(model, IDS.tolist()), before, rtol=1e-4, atol=1e-4)
    assert seam_of(model).layout is None


@pytest.mark.parametrize("name", REFUSED)
def test_layers_of_another_kind_are_refused(name: str):
    with pytest.raises(EngineError, match="AttentionInterface"):
        tiny_family(name)


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("recurrent_gemma", "RecurrentGemmaRecurrentBlock"),
        ("zaya", "ZayaCCAProjection"),
        ("openai-gpt", "no layers"),
    ],
)
def test_layers_that_keep_their_state_or_are_not_known_are_refused(family: str, layer: str):
    config = AutoConfig.for_model(family, **DENSE, num_experts=4)
    with torch.device("meta"):
        assert layer in unknown_layers(AutoModelForCausalLM.from_config(config))
