"""Tiny random models of the families that people download most, by their configs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from practicum.models.load_model import ready

VOCABULARY, HIDDEN, CONTEXT, LAYERS = 64, 32, 256, 4
IDS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
DENSE: dict[str, Any] = IDS | {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
}
ALL_HEADS: dict[str, Any] = {k: v for k, v in DENSE.items() if k not in ("num_key_value_heads", "head_dim")}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MAMBA: dict[str, Any] = IDS | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
SHARED: dict[str, Any] = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}
GPT2: dict[str, Any] = IDS | {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
DEEPSEEK: dict[str, Any] = EXPERTS | {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}

ATTENTION: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "mistral": DENSE | {"sliding_window": 16},
    "gpt2": GPT2,
    "gemma": DENSE,
    "gemma2": DENSE | {"sliding_window": 16},
    "gemma3_text": DENSE | {"sliding_window": 16},
    "phi": ALL_HEADS,
    "phi3": DENSE,
    "opt": ALL_HEADS | {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN},
    "gpt_neox": ALL_HEADS,
    "gpt_bigcode": GPT2,
    "starcoder2": DENSE,
    "stablelm": DENSE,
    "olmo2": DENSE,
    "smollm3": DENSE,
    "cohere2": DENSE | {"sliding_window": 16},
    "glm4": DENSE,
    "granite": DENSE,
    "exaone4": DENSE | {"sliding_window": 16, "sliding_window_pattern": 2},
    "ernie4_5": DENSE,
}
MOE: dict[str, dict[str, Any]] = {
    "mixtral": DENSE | EXPERTS | {"num_local_experts": 4},
    "qwen2_moe": DENSE | SHARED,
    "qwen3_moe": DENSE | SHARED,
    "olmoe": DENSE | SHARED,
    "gpt_oss": DENSE | EXPERTS | {"num_local_experts": 4, "sliding_window": 16},
    "granitemoe": DENSE | EXPERTS | {"num_local_experts": 4},
    "phimoe": DENSE | EXPERTS | {"num_local_experts": 4},
    "deepseek_v2": DENSE | LATENT | DEEPSEEK | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": DENSE | LATENT | DEEPSEEK,
    "glm4_moe": DENSE | DEEPSEEK,
}
STATE: dict[str, dict[str, Any]] = {
    "qwen3_next": DENSE | SHARED | DELTA,
    "qwen3_5_text": DENSE | DELTA,
    "olmo_hybrid": DENSE | DELTA,
    "kimi_linear": DENSE | LATENT | DEEPSEEK | {
        "num_experts": 4, "q_lora_rank": None, "linear_num_heads": 4, "linear_head_dim": 8,
        "n_group": 1, "topk_group": 1, "layer_types": DELTA["layer_types"],
    },
    "lfm2": DENSE | {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": DENSE | SHARED | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "nemotron_h": DENSE | DEEPSEEK | {
        "layers_block_type": ["mamba", "attention", "mlp", "moe"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    },
    "granitemoehybrid": DENSE | MAMBA2 | EXPERTS | {
        "num_local_experts": 4, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"] * 2,
    },
    "falcon_h1": DENSE | MAMBA2 | {"mamba_d_ssm": 64},
    "bamba": DENSE | MAMBA2 | {"attn_layer_indices": [1, 3]},
    "jamba": DENSE | EXPERTS | {
        "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "attn_layer_period": 2, "attn_layer_offset": 1,
    },
    "mamba2": MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
}  # fmt: skip
NEWER: dict[str, dict[str, Any]] = {
    "seed_oss": DENSE,
    "kolibri1": DENSE | SHARED | {
        "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "lfm3": DENSE | {
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "sliding_window": 16,
    },
    "qwen3_5_moe_text": DENSE | SHARED | DELTA,
    "bailing_hybrid": DENSE | LATENT | EXPERTS | {
        "num_local_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "layer_types": DELTA["layer_types"], "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "num_mtp_layers": 0,
    },
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "bloom": IDS | {"hidden_size": HIDDEN, "n_layer": 2, "n_head": 4},
    "falcon": ALL_HEADS,
    "gpt_neo": IDS | {
        "hidden_size": HIDDEN, "num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": CONTEXT,
    },
    "gptj": GPT2 | {"rotary_dim": 4},
    "llama4_text": DENSE | EXPERTS | {"num_local_experts": 4, "intermediate_size_mlp": 48},
    "gemma4_text": DENSE | {
        "global_head_dim": 16, "sliding_window": 16, "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}  # fmt: skip
FAMILIES = ATTENTION | MOE | STATE | NEWER | REFUSED


def tiny_config(family: str, **more: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **(FAMILIES[family] | more))


def tiny_family(family: str, *, prepared: bool = True, **more: Any) -> PreTrainedModel:
    """A random model whose weights are large enough for every layer to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **more), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(3.0)
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.normal_()
    return ready(model, torch.device("cpu")) if prepared else model
