"""Configs of the tiny models that a recipe makes on the spot."""

from __future__ import annotations

from typing import Any

from transformers import (
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from practicum.models.processor import VISION, VISION_SPECIALS
from practicum.recipe.derived import made_sizes
from practicum.recipe.schema.recipe import MakeModel


def made_config(spec: MakeModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return the config of a model made for this tokenizer. A new family is a line here."""
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        **made_sizes(spec),
    }
    if spec.family == "qwen2_5_vl":
        return _vision_config(spec, tokenizer, common)
    common["tie_word_embeddings"] = True
    if spec.family == "gpt2":
        return GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **common)
    if spec.family == "qwen3_moe":
        return Qwen3MoeConfig(**common, norm_topk_prob=True)
    return {"qwen3": Qwen3Config, "qwen3_5": Qwen3_5TextConfig, "llama": LlamaConfig}[spec.family](**common)


def _vision_config(
    spec: MakeModel, tokenizer: PreTrainedTokenizerBase, text: dict[str, Any]
) -> PreTrainedConfig:
    """Return a language model as wide as its vision tower, whose patches are those of the made processor."""
    start, end, image, video = (tokenizer.get_vocab()[token] for token in VISION_SPECIALS)
    half = spec.hidden // spec.heads // 2
    space = max(1, 3 * half // 8)
    depth = max(1, spec.layers // 2)
    vision = {
        "depth": depth,
        # The tower turns each head by two axes of pairs: its width is a multiple of 4 for each head.
        "hidden_size": 4 * spec.heads * max(1, spec.hidden // (4 * spec.heads)),
        "intermediate_size": 3 * spec.hidden,
        "num_heads": spec.heads,
        "out_hidden_size": spec.hidden,
        "patch_size": VISION["patch_size"],
        "spatial_merge_size": VISION["merge_size"],
        "temporal_patch_size": VISION["temporal_patch_size"],
        "window_size": 16 * VISION["patch_size"],
        "fullatt_block_indexes": [depth - 1],
    }
    sections = [half - 2 * space, space, space]
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    return Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
