"""The torch engine's uses of a model: compute prompts, decode one token for each row, sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.errors import EngineError
from practicum.models.attention import IMPLEMENTATION, Layout, head_logits, packed_forward
from practicum.models.fingerprint import fingerprint_ids
from practicum.rollout.kv import DecodeLayout, KvMemory, PrefillLayout
from practicum.rollout.lean import lean_decoder
from practicum.rollout.queue import Prompt
from practicum.rollout.sampler import Draw, Sampled, sample

LOGITS_AT_ONCE = 2**24
SAMPLED_AT_ONCE = 2**20
"""Logits whose softmax and running sum are made at once: small enough for these to stay in the cache."""
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


class Runner:
    """A model and the leanest forward that gives its numbers; a model the engine can't run is an EngineError.

    Both are found out by a comparison with the model's plain forward, so that an attention which packed
    layouts do not know is an error here and not wrong samples later.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        kind = type(model).__name__
        if model.config._attn_implementation != IMPLEMENTATION:
            raise EngineError(f"{kind} is not prepared for packed attention: see models.load.ready")
        self.model, self.device = model, model.device
        self.vocab: int = model.get_input_embeddings().weight.shape[0]  # pyright: ignore
        self.hidden_size: int = model.get_input_embeddings().weight.shape[1]  # pyright: ignore
        self._lean = lean_decoder(model)
        gap, most = _probe(self)
        if self._lean is not None and not gap <= most:
            self._lean = None
            gap, most = _probe(self)
        if not gap <= most:
            raise EngineError(
                f"{kind} gives other logits with packed attention than without (off by {gap:.2g}, expected "
                f"{most:.2g} at most): the torch engine can't run this architecture"
            )
        with torch.no_grad():
            self.token_kv = prefill(self, [[0]])[0].kv
            """What the model keeps of one token, for the shape of KV memory."""

    @property
    def is_lean(self) -> bool:
        """Whether the model runs by the lean forward."""
        return self._lean is not None

    def hidden(self, ids_N: Tensor, positions_N: Tensor, layout: Layout) -> Tensor:
        """Last hidden states [N, hidden] of packed tokens."""
        if self._lean is not None:
            return self._lean(ids_N, positions_N, layout)
        return packed_forward(self.model, ids_N, positions_N, layout)

    def logits(self, hidden_N: Tensor) -> Tensor:
        """Logits [N, V] of last hidden states."""
        return head_logits(self.model, hidden_N)


def prefill(runner: Runner, prompts: Sequence[Sequence[int]]) -> list[Prompt]:
    """Compute prompts in one packed forward call."""
    lengths = [len(prompt) for prompt in prompts]
    layout = PrefillLayout(lengths, runner.device)
    hidden_N = runner.hidden(*pack(prompts, runner.device), layout)
    last_G = torch.tensor(lengths, device=runner.device).cumsum(0) - 1
    return [
        Prompt(kv, hidden) for kv, hidden in zip(layout.prompts(), hidden_N[last_G].unbind(), strict=True)
    ]


def pack(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and positions [N] of sequences, one behind the other."""
    ids_N = torch.tensor([i for sequence in sequences for i in sequence], device=device)
    positions_N = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    return ids_N, positions_N.to(device)


def decode(runner: Runner, memory: KvMemory, token_B: Tensor, length_B: Tensor) -> Tensor:
    """Last hidden states [B, hidden] of one new token for each slot, put behind the `length` it holds."""
    return runner.hidden(token_B, length_B, DecodeLayout(memory, length_B))


def sample_hidden(runner: Runner, hidden_B: Tensor, draw: Draw, uniform_B: Tensor) -> Sampled:
    """Sample every row in the same way, never holding more than LOGITS_AT_ONCE logits."""
    rows, fine_rows = (max(1, most // runner.vocab) for most in (LOGITS_AT_ONCE, SAMPLED_AT_ONCE))
    parts: list[Sampled] = []
    for hidden, uniform in zip(hidden_B.split(rows), uniform_B.split(rows), strict=True):
        logits = runner.logits(hidden)
        parts += map(sample, logits.split(fine_rows), repeat(draw), uniform.split(fine_rows))
    return parts[0] if len(parts) == 1 else Sampled(*map(torch.cat, zip(*parts, strict=True)))


@torch.no_grad()
def _probe(runner: Runner) -> tuple[float, float]:
    """How far logits of a fixed sequence, half of it a prompt and half decoded, are off; and may be."""
    ids = fingerprint_ids(runner.vocab)
    half = len(ids) // 2
    _, prompt = prefill(runner, [ids[:1], ids[:half]])
    memory = KvMemory(prompt.kv, 2, len(ids))
    memory.put_prompt(prompt.kv, 0, 2)
    hidden = [prompt.hidden]
    for position in range(half, len(ids)):
        token_B, length_B = torch.tensor([[ids[position]] * 2, [position] * 2], device=runner.device)
        hidden.append(decode(runner, memory, token_B, length_B)[1])
    packed = runner.logits(torch.stack(hidden))
    plain = runner.model(torch.tensor([ids], device=runner.device), use_cache=False).logits[0, half - 1 :]
    tolerance = _TOLERANCE.get(plain.dtype, 5e-2)
    return float((packed - plain).abs().max()), tolerance * float(plain.abs().max())
