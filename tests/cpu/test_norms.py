"""The fused norm equals transformers' own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from practicum.cpu.norms import fuse_norms


def norm_of(kind, dtype=torch.float32):
    norm = kind(16, eps=1e-3).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, 16))
    return norm


def run(norm, x, weights):
    x = x.clone().requires_grad_()
    out = norm(x)
    return [out, *torch.autograd.grad((out * weights).sum(), [x, norm.weight])]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 4, 16)])
def test_values_and_gradients_equal_the_original(kind, shape):
    g = torch.Generator().manual_seed(0)
    x, weights = (torch.randn(shape, generator=g) for _ in range(2))
    fused, original = norm_of(kind), norm_of(kind)
    assert fuse_norms(fused) == 1
    for mine, theirs in zip(run(fused, x, weights), run(original, x, weights), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), original(x), rtol=1e-5, atol=1e-6)


def test_gradient_is_exact_in_double_precision():
    norm = norm_of(Qwen3RMSNorm, torch.float64)
    fuse_norms(norm)
    x = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def call(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(call, (x.requires_grad_(), norm.weight))


def test_other_norms_are_left_alone():
    assert fuse_norms(GemmaRMSNorm(16)) == 0
    assert fuse_norms(norm_of(Qwen3RMSNorm, torch.bfloat16)) == 0
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=5))
    assert fuse_norms(gpt2) == 0


def test_copies_use_their_own_weights_and_pickles_work():
    norm = norm_of(Qwen3RMSNorm)
    fuse_norms(norm)
    other = copy.deepcopy(norm)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        other.weight.mul_(2)
    torch.testing.assert_close(other(x), 2 * norm(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(norm))(x), norm(x))
