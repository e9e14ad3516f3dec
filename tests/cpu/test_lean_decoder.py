"""The lean forward: the numbers of the model's own, and only for models that it knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from practicum.cpu.lean_decoder import lean_decoder
from practicum.engines.protocol import Counter
from practicum.engines.torch.model_runner import ModelRunner, StepInputs
from practicum.models.attention import packed_forward
from practicum.models.load_model import ready
from practicum.models.packed_attention import PackedLayout
from tests.engines.engines import engine_of, generate, sampling, tiny

SIZE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZE),
    "llama with biases": LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama with wide heads": LlamaConfig(**SIZE, head_dim=24, rms_norm_eps=1e-2),
    "llama with scaled positions": LlamaConfig(
        **SIZE, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    ),
    "mistral": MistralConfig(**SIZE, sliding_window=None),
    "qwen2": Qwen2Config(**SIZE),
    "qwen3": Qwen3Config(**SIZE, head_dim=8),
}


def made(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return ready(model, torch.device("cpu"))


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_equal_the_packed_forward(name: str):
    model = made(CONFIGS[name])
    runner = ModelRunner(model)
    assert runner.lean is not None
    lengths = [7, 1, 12]
    ids, positions = torch.arange(20) % 50, torch.cat([torch.arange(n) for n in lengths])
    layout = PackedLayout.of_sequences(lengths).to(model.device)
    with torch.no_grad():
        torch.testing.assert_close(
            runner.hidden(StepInputs(ids, positions, ()), layout),
            packed_forward(model, ids, positions, layout),
            rtol=1e-4,
            atol=1e-5,
        )


def test_it_follows_weights_that_change_in_place():
    model = made(CONFIGS["llama"])
    runner = ModelRunner(model)
    assert runner.lean is not None
    ids, layout = torch.arange(6), PackedLayout.of_sequences([6])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.5
        torch.testing.assert_close(
            runner.hidden(StepInputs(ids, ids, ()), layout),
            packed_forward(model, ids, ids, layout),
            rtol=1e-4,
            atol=1e-5,
        )


def with_another_linear(model: PreTrainedModel) -> None:
    class Adapter(nn.Linear):
        def forward(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * super().forward(x)

    model.model.layers[1].mlp.up_proj.__class__ = Adapter  # pyright: ignore


def with_a_hook(model: PreTrainedModel) -> None:
    hooked = model.model.layers[0].self_attn.o_proj  # pyright: ignore
    hooked.register_forward_hook(lambda module, args, out: 2 * out)  # pyright: ignore


@pytest.mark.parametrize("change", [with_another_linear, with_a_hook])
def test_models_that_were_changed_run_as_they_are(change):
    model = made(CONFIGS["llama"])
    plain, changed = made(CONFIGS["llama"]), model
    change(changed)
    got = {}
    for name, each in (("plain", plain), ("changed", changed)):
        with engine_of(each, context=32) as engine:
            assert (engine.runner.lean is not None) == (name == "plain")
            got[name] = generate(engine, [([5], sampling(20, greedy=True), Counter(0, 0))])[0]
    assert got["plain"].tokens.tolist() != got["changed"].tokens.tolist()


def test_a_family_member_with_other_numbers_runs_by_the_packed_forward():
    model = made(CONFIGS["llama"])
    layer: Any = model.model.layers[0]  # pyright: ignore
    own = layer.forward
    layer.forward = lambda *args, **kwargs: 1.5 * own(*args, **kwargs)
    assert lean_decoder(model) is not None
    with engine_of(model, context=32) as engine:
        assert engine.runner.lean is None


@pytest.mark.parametrize(
    ("family", "dtype"), [("gpt2", torch.float32), ("qwen3", torch.float64), ("llama", torch.bfloat16)]
)
def test_other_models_go_without_it(family: str, dtype: torch.dtype):
    with engine_of(tiny(family, dtype=dtype)) as engine:
        assert engine.runner.lean is None
        (got,) = generate(engine, [([5, 6], sampling(8), Counter(0, 0))])
    assert len(got.tokens) == 8


def test_a_model_with_a_sliding_window_goes_without_it():
    with engine_of(made(MistralConfig(**SIZE, sliding_window=40)), context=64) as engine:
        assert engine.runner.lean is None
