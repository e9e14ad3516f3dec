"""The torch engine's uses of a model: compute prompts, decode one token for each row, sample."""

from __future__ import annotations

from collections.abc import Sequence

from itertools import repeat

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.errors import EngineError
from practicum.models.attention import IMPLEMENTATION, head_logits, packed_forward
from practicum.models.fingerprint import fingerprint_ids
from practicum.rollout.kv import DecodeLayout, KvMemory, KvShape, PrefillLayout
from practicum.rollout.queue import Prompt
from practicum.rollout.sampler import Draw, Sampled, sample

LOGITS_AT_ONCE = 2**24
SAMPLED_AT_ONCE = 2**20
"""Logits whose softmax and running sum are made at once: small enough for these to stay in the cache."""
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


def vocab_size(model: PreTrainedModel) -> int:
    """How many token ids the model can read."""
    return model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportReturnType]


def prefill(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[Prompt]:
    """Compute prompts in one packed forward call."""
    lengths = [len(prompt) for prompt in prompts]
    ids_N = torch.tensor([i for prompt in prompts for i in prompt], device=model.device)
    positions_N = torch.cat([torch.arange(n) for n in lengths]).to(model.device)
    layout = PrefillLayout(lengths, model.device)
    hidden_N = packed_forward(model, ids_N, positions_N, layout)
    last_G = torch.tensor(lengths, device=model.device).cumsum(0) - 1
    return [
        Prompt(kv, hidden) for kv, hidden in zip(layout.prompts(), hidden_N[last_G].unbind(), strict=True)
    ]


def decode(model: PreTrainedModel, memory: KvMemory, token_B: Tensor, length_B: Tensor) -> Tensor:
    """Last hidden states [B, hidden] of one new token for each slot, put behind the `length` it holds."""
    return packed_forward(model, token_B, length_B, DecodeLayout(memory, length_B))


def sample_hidden(
    model: PreTrainedModel, hidden_B: Tensor, draw: Draw, uniform_B: Tensor
) -> Sampled:
    """Sample every row in the same way, never holding more than LOGITS_AT_ONCE logits."""
    vocab = vocab_size(model)
    rows, fine_rows = (max(1, most // vocab) for most in (LOGITS_AT_ONCE, SAMPLED_AT_ONCE))
    parts: list[Sampled] = []
    for hidden, uniform in zip(hidden_B.split(rows), uniform_B.split(rows), strict=True):
        logits = head_logits(model, hidden)
        parts += map(sample, logits.split(fine_rows), repeat(draw), uniform.split(fine_rows))
    return parts[0] if len(parts) == 1 else Sampled(*map(torch.cat, zip(*parts, strict=True)))


@torch.no_grad()
def check_model(model: PreTrainedModel, context: int) -> KvShape:
    """Compare prompts and decoding with the model's plain forward; what its layers keep of a token.

    A model whose attention packed layouts do not know is an EngineError here, not wrong samples later.
    """
    kind = type(model).__name__
    if model.config._attn_implementation != IMPLEMENTATION:
        raise EngineError(f"{kind} is not prepared for packed attention: pass it through models.load.ready")
    ids = fingerprint_ids(vocab_size(model))[:context]
    half = (len(ids) + 1) // 2
    _, prompt = prefill(model, [ids[:1], ids[:half]])
    shape = _kv_shape(prompt)
    memory = KvMemory(shape, 2, len(ids), model.device)
    memory.put_prompt(prompt.kv, 0, 2)
    hidden = [prompt.hidden]
    for position in range(half, len(ids)):
        token_B, length_B = torch.tensor([[ids[position]] * 2, [position] * 2], device=model.device)
        hidden.append(decode(model, memory, token_B, length_B)[1])
    packed = head_logits(model, torch.stack(hidden)).double()
    plain = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, half - 1 :].double()
    gap, scale = float((packed - plain).abs().max()), float(plain.abs().max())
    if not gap <= _TOLERANCE.get(model.dtype, 5e-2) * scale:
        raise EngineError(
            f"{kind} gives other logits with packed attention than without (off by {gap:.2g} of "
            f"{scale:.2g}): the torch engine can't run this architecture"
        )
    return shape


def _kv_shape(prompt: Prompt) -> KvShape:
    layers, heads, _, key_dim = prompt.kv.keys.shape
    return KvShape(layers, heads, key_dim, prompt.kv.values.shape[3], prompt.kv.keys.dtype)
