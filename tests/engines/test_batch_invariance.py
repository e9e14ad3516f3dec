"""What is sampled, to the last bit, whatever else is in the engine: neighbours, slots, kept turns, timing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from practicum.cpu import batch_invariance
from practicum.cpu.batch_invariance import KEY_STEP, LANES, ROWS, padded_keys, padded_tokens, rounded_rows
from practicum.dataplane.ragged import Ragged
from practicum.engines.protocol import Counter, GenerateRequest, Generation, ScoreRequest
from practicum.engines.torch import model_runner
from practicum.engines.torch.kv_memory import KvMemory, PromptKv
from practicum.engines.torch.prompt_cache import CachedSequence
from practicum.engines.torch.request_queue import ScoreJob
from practicum.engines.torch.score_batch import _hidden
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import RowSpans
from practicum.models.attention import head_logits, packed_forward
from practicum.models.load_model import ready
from practicum.models.packed_attention import PackedLayout
from practicum.models.vision import Images
from practicum.recipe.schema.recipe import Train
from practicum.roles.sync import describe_engines
from tests.engines.engines import engine_of, picture_prompt, pictures, prompts, sampling, tiny

CPU = torch.device("cpu")
LONG: Any = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_window_layers": 1,
    "initializer_range": 0.4,
}
Prompt = tuple[list[int], Images | None]
model_of = cache(tiny)


def asked_of(model: PreTrainedModel, count: int = 5) -> list[Prompt]:
    """Prompts, two of which are equal; a vision model's come with pictures."""
    if not hasattr(model.config, "vision_config"):
        return [(ids, None) for ids in [*prompts(count - 1), prompts(1)[0]]]
    sizes = [((2, 3),), ((1, 4), (3, 2)), (), ((1, 1),), ((2, 3),)][:count]
    return [
        (picture_prompt(model, *s), pictures(model, *s, seed=i) if s else None) for i, s in enumerate(sizes)
    ]


async def talk(engine: TorchEngine, prompt: Prompt, number: int, waits: Sequence[float]) -> list[Generation]:
    """Turns with some time and some tokens between them, of which the engine may keep what it computed."""
    ids, images = list(prompt[0]), prompt[1]
    turns = []
    for turn, wait in enumerate(waits):
        await asyncio.sleep(wait)
        drawn = sampling(3 + 4 * ((number + turn) % 3))
        made = await engine.generate(
            GenerateRequest(ids, drawn, Counter(0, number, 0, turn), keep=True, images=images)
        )
        turns.append(made)
        ids = [*ids, *made.tokens.tolist(), *range(5, 6 + number)]
    return turns


def talks(engine: TorchEngine, asked: Sequence[tuple[int, Prompt]], waits: Sequence[Sequence[float]]) -> Any:
    async def run() -> list[list[Generation]]:
        pairs = zip(asked, waits, strict=True)
        return await asyncio.gather(*(talk(engine, prompt, number, each) for (number, prompt), each in pairs))

    return asyncio.run(run())


@cache
def alone(family: str) -> list[list[Generation]]:
    """Each talk by itself in an engine that keeps nothing: every turn's prompt is computed whole."""
    model = model_of(family)
    made = []
    for number, prompt in enumerate(asked_of(model)):
        with engine_of(model, slots=1, keep_tokens=0) as engine:
            made += talks(engine, [(number, prompt)], [[0.0] * 3])
    return made


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_moe", "qwen2_5_vl"])
@settings(max_examples=4, phases=[Phase.generate])  # what fails by its timing can't be made smaller
@given(
    waits=st.lists(
        st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=3, max_size=3), min_size=5, max_size=5
    ),
    slots=st.integers(1, 7),
    keep_tokens=st.sampled_from([None, 0, 40]),
    prefill_tokens=st.sampled_from([1, 30, 8192]),
)
def test_turns_are_the_same_bits_with_any_timing(family: str, waits, slots, keep_tokens, prefill_tokens):
    model, expected = model_of(family), alone(family)
    with engine_of(model, slots=slots, keep_tokens=keep_tokens, prefill_tokens=prefill_tokens) as engine:
        assert engine.runner.invariant
        made = talks(engine, list(enumerate(asked_of(model))), waits)
    for turns, others in zip(made, expected, strict=True):
        for one, other in zip(turns, others, strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.logprobs, other.logprobs)
            assert torch.equal(one.plain_logprobs, other.plain_logprobs)
            if one.experts is not None or other.experts is not None:
                assert torch.equal(one.experts, other.experts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "qwen3_moe", "qwen2_5_vl"])
def test_sampled_logprobs_are_those_of_scoring_and_of_the_learners_forward(family: str):
    model = model_of(family)
    (ids, images), (turn, *_) = asked_of(model)[0], alone(family)[0]
    whole = [*ids, *turn.tokens.tolist()]
    with engine_of(model) as engine:
        scored = asyncio.run(engine.score(ScoreRequest(whole, len(ids), images=images)))
        inputs = model_runner.pack(model.config, [model_runner.PromptKey.of(whole, images)], CPU)
    layout = PackedLayout.of_sequences([len(whole)])
    hidden = packed_forward(model, inputs.ids_N, inputs.positions_N, layout, inputs.images, inputs.picture_N)[
        len(ids) - 1 : -1
    ]
    learnt = head_logits(model, hidden).log_softmax(-1).gather(1, turn.tokens.unsqueeze(1)).squeeze(1)
    assert torch.equal(scored.logprobs, turn.plain_logprobs)
    assert torch.equal(learnt, turn.plain_logprobs)


@pytest.mark.parametrize("window", [None, 600])
def test_long_sequences_are_the_same_bits_by_every_path(window: int | None):
    """Prefilled whole, decoded, continued from kept tokens, scored, learnt from with a shared prompt."""
    config = Qwen2Config(**LONG, use_sliding_window=window is not None, sliding_window=window)
    torch.manual_seed(0)
    model = ready(AutoModelForCausalLM.from_config(config, dtype=torch.float32), CPU)
    ids = torch.randint(0, 64, (1300,), generator=torch.Generator().manual_seed(1)).tolist()
    runner = model_runner.ModelRunner(model)
    first, prompt = model_runner.PromptKey(tuple(ids[:1]), b""), model_runner.PromptKey(tuple(ids[:-1]), b"")
    with torch.no_grad():
        (whole,) = model_runner.prefill(runner, [prompt])
        memory = KvMemory(whole.kv, 3, len(ids))
        for slot, filled in ((0, 900), (1, 1150)):
            part = PromptKv(whole.kv.keys[:, :, :filled], whole.kv.values[:, :, :filled])
            memory.put_prompt(part, slot, 1)
        kept = [CachedSequence(tuple(ids[:n]), b"", whole.kv, None, 0) for n in (900, 1150)]
        extended = model_runner.extend(runner, memory, [prompt] * 2, list(enumerate(kept)))
        memory.put_prompt(model_runner.prefill(runner, [first])[0].kv, 2, 1)
        token_B, length_B = torch.tensor([[ids[-1], ids[-1], ids[1]], [len(ids) - 1] * 2 + [1]])
        decoded_B, _ = model_runner.decode(runner, memory, token_B, length_B)
    tensors = [torch.tensor(ids[start:stop]) for start, stop in ((0, 700), (700, 1300), (700, 900))]
    rows = RowSpans(Ragged.from_rows([tensors[0]] * 2), Ragged.from_rows(tensors[1:]))
    learnt_M = PackedModel(model, Train()).hidden(rows.pack([0, 1]))
    (scored,) = _hidden(runner, [ScoreJob(ScoreRequest([*ids, 0], 1000))])
    for one in extended:
        assert torch.equal(one.kv.keys, whole.kv.keys)
        assert torch.equal(one.hidden, whole.hidden)
    assert torch.equal(decoded_B[0], decoded_B[1])
    assert torch.equal(decoded_B[0], scored[-1])
    assert torch.equal(whole.hidden, scored[-2])
    assert torch.equal(learnt_M[599], scored[-2])
    assert torch.equal(learnt_M[300:599], scored[:299])


@pytest.mark.parametrize("threads", [1, 3, 5])
@pytest.mark.parametrize("width", [64, 100])
def test_activations_round_alike_on_any_number_of_threads(threads: int, width: int):
    x = 3 * torch.randn(3000, width, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        expected = torch.cat([silu(rows) for rows in x.split(16)])
        for count in (1, 7, 1050, 1100, 2600):
            padded = padded_tokens(count, width)
            assert count <= padded < rounded_rows(count) + LANES * threads
            assert torch.equal(silu(x[:padded])[:count], expected[:count])
    finally:
        torch.set_num_threads(before)


@given(st.integers(1, 5000))
def test_padded_keys_are_enough_and_not_many(count: int):
    padded = padded_keys(count)
    assert count <= padded == padded_keys(padded)
    assert padded % KEY_STEP == 0
    assert padded - count < 256


@pytest.mark.parametrize(("name", "value"), [("_padded_keys", lambda count, *_: count), ("ROWS", 1)])
def test_the_probe_sees_shapes_in_which_bits_differ(name: str, value: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_invariance, name, value)
    assert not batch_invariance.attention_is_invariant.__wrapped__(16, torch.float32, CPU, 1)


def test_the_probe_sees_activations_that_are_not_padded(monkeypatch: pytest.MonkeyPatch):
    probe = batch_invariance.activations_are_invariant.__wrapped__
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert probe(101, torch.float32, CPU, 3)
        monkeypatch.setattr(batch_invariance, "LANES", 1)
        assert not probe(101, torch.float32, CPU, 3)
    finally:
        torch.set_num_threads(before)


def test_an_engine_whose_products_see_their_batch_says_so(monkeypatch: pytest.MonkeyPatch):
    model = tiny()
    with engine_of(model) as engine:
        assert describe_engines(engine) == []

    def seeing(module: torch.nn.Module, args: Any, out: Tensor) -> Tensor:
        return out + (1e-6 if len(out) > ROWS else 0.0)

    head = model.get_output_embeddings()
    head.register_forward_hook(seeing)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    with engine_of(model) as engine:
        assert not engine.runner.invariant
        (sentence,) = describe_engines(engine)
    assert "each is computed alone" in sentence
    assert "(cpu, float32)" in sentence


@pytest.mark.parametrize("width", [1024, 2**14, 2**17])
def test_activations_of_wide_layers_are_probed(width: int):
    assert batch_invariance.activations_are_invariant.__wrapped__(width, torch.float32, CPU, 1)
