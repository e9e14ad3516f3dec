"""Families with sliding windows, soft caps and sinks: learner and engine give the plain model's numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from practicum.dataplane.ragged import Ragged
from practicum.engines.protocol import Counter
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import RowSpans
from practicum.models.load_model import ready
from practicum.models.packed_attention import PackedLayout
from practicum.models.padded_attention import AttentionRule
from practicum.recipe.schema.recipe import Train
from tests.engines.engines import engine_of, generate, sampling

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 5,
    "initializer_range": 0.4,
}
LAYERS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, PretrainedConfig] = {
    "gemma2": Gemma2Config(**SIZES, **LAYERS, attn_logit_softcapping=1.0, final_logit_softcapping=4.0),
    "gemma3": Gemma3TextConfig(**SIZES, **LAYERS),
    "mistral": MistralConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=1),
    "gpt_oss": GptOssConfig(**SIZES, **LAYERS, num_local_experts=4, num_experts_per_tok=2),
}


@cache
def family(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
    return ready(model, torch.device("cpu"))


def plain_hidden(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """By transformers' own attention for this family."""
    model.set_attn_implementation("eager")
    try:
        return model.base_model(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state[0]
    finally:
        model.set_attn_implementation("practicum")


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_and_gradients_are_the_plain_models(name: str, monkeypatch: pytest.MonkeyPatch):
    model = family(name)
    used: list[AttentionRule] = []
    attend = PackedLayout.attend
    monkeypatch.setattr(PackedLayout, "attend", lambda *args: (used.append(args[-1]), attend(*args))[1])
    ids = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))
    # The first and the last response begin alike, by more tokens than the window has.
    prompt, responses = ids[:9], (ids[9:30], ids[20:40], torch.cat([ids[9:17], ids[30:40]]))
    packed = RowSpans(Ragged.from_rows([prompt] * 3), Ragged.from_rows(list(responses))).pack([0, 1, 2])
    mine_M = PackedModel(model, Train()).hidden(packed)
    theirs_M = torch.cat([plain_hidden(model, torch.cat([prompt, r[:-1]]))[8:] for r in responses])
    torch.testing.assert_close(mine_M, theirs_M, rtol=1e-4, atol=1e-4)
    assert any(rule.window == 5 for rule in used)
    assert (name == "gemma2") == any(rule.softcap == 1.0 for rule in used)
    assert (name == "gpt_oss") == any(rule.sinks is not None for rule in used)

    weights_MH = torch.randn(mine_M.shape, generator=torch.Generator().manual_seed(2))
    leaves = [
        p for n, p in model.named_parameters() if n.endswith(("q_proj.weight", "v_proj.weight", "sinks"))
    ]
    grads = [torch.autograd.grad((x * weights_MH).sum(), leaves) for x in (mine_M, theirs_M)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_samples_with_the_plain_models_logprobs(name: str):
    model = family(name)
    prompts = [list(range(3, 3 + n)) for n in (2, 11, 4)]
    with engine_of(model, slots=2) as engine:
        made = generate(engine, [(ids, sampling(12), Counter(0, i)) for i, ids in enumerate(prompts)])
    for ids, one in zip(prompts, made, strict=True):
        whole = torch.tensor([*ids, *one.tokens.tolist()])
        model.set_attn_implementation("eager")
        logits = model(input_ids=whole.unsqueeze(0), use_cache=False).logits[0, len(ids) - 1 : -1]
        model.set_attn_implementation("practicum")
        theirs = logits.log_softmax(-1).gather(1, one.tokens.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(one.plain_logprobs, theirs, rtol=0, atol=1e-3)
