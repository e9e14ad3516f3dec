"""A model and how it is run: packed, in micro-batches, on its device, in its precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.dataplane.ragged import Ragged
from practicum.errors import EngineError
from practicum.learning.norms import fuse_norms
from practicum.learning.packing import Packed, Rows
from practicum.models.attention import IMPLEMENTATION, packed_forward
from practicum.models.fingerprint import fingerprint_ids
from practicum.recipe.schema import Train

CPU_MICROBATCH_TOKENS = 2048
"""On a CPU, larger micro-batches are slower: activations leave the caches (measured, 250 to 4,000 tokens)."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of the self-test's hidden states, in parts of their largest value."""


class Trunk:
    """A transformers model with packed attention (models/load.py `ready`), with or without a head.

    Holds no state of its own: the same model may be used elsewhere too. At construction the packed forward
    is compared with the model's own on a short probe; an EngineError names a model that it does not fit.
    """

    def __init__(self, model: PreTrainedModel, train: Train) -> None:
        self.model = model
        self.device = model.device
        self.token_budget = train.microbatch_tokens
        if self.device.type == "cpu":
            self.token_budget = min(self.token_budget, CPU_MICROBATCH_TOKENS)
        self.autocast = train.autocast == "bfloat16"
        self.gradient_checkpointing = train.gradient_checkpointing
        fuse_norms(model)
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._forward: Callable[..., Tensor] = packed_forward
        if train.compile:
            self._forward = torch.compile(packed_forward, dynamic=True)
        self.self_test()

    @property
    def dtype(self) -> torch.dtype:
        """Number type of logprobs, values and losses: float32, or float64 for a float64 model."""
        return torch.promote_types(self.model.dtype, torch.float32)

    def microbatches(
        self,
        rows: Rows,
        *,
        only: Sequence[int] | None = None,
        sampled_M: Tensor | None = None,
        sessions: Sequence[int] | None = None,
    ) -> Iterator[Packed]:
        """Micro-batches on the model's device; arguments as of `Rows.microbatches`."""
        for packed in rows.microbatches(self.token_budget, rows=only, sampled_M=sampled_M, sessions=sessions):
            yield packed.to(self.device)

    def hidden(self, packed: Packed) -> Tensor:
        """The hidden states [M, hidden] that predict the micro-batch's response tokens."""
        hidden_N = self._forward(self.model, packed.ids_N, packed.positions_N, packed.layout)
        return hidden_N.index_select(0, packed.gather_M)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Mixed precision, if the recipe asks for it; the forward pass and the head belong inside."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around forward passes whose activations are to be recomputed, if the recipe asks for that."""
        # transformers' layers recompute in training mode only; dropout is off either way.
        self.model.train(self.gradient_checkpointing)
        try:
            yield
        finally:
            self.model.eval()

    @torch.no_grad()
    def self_test(self) -> None:
        """Compare hidden states of packed rows that share a prompt with the model's own forward."""
        name = type(self.model).__name__
        if self.model.config._attn_implementation != IMPLEMENTATION:
            raise EngineError(
                f"{name} does not let its attention be replaced (transformers' AttentionInterface), so "
                "practicum can't train this architecture"
            )
        try:
            gap = self._probe_gap()
        except (TypeError, ValueError, RuntimeError) as error:
            raise EngineError(f"{name} can't run packed rows: {error}") from error
        allowed = _TOLERANCE[self.model.dtype]
        if not gap <= allowed:
            raise EngineError(
                f"{name}: packed rows differ from the model's own forward pass by {gap:.2g} (allowed: "
                f"{allowed:.2g}), so practicum can't train this architecture: "
                "its layers do more than causal attention over positions"
            )

    def _probe_gap(self) -> float:
        """Largest difference of the two forward passes, in parts of the largest hidden state."""
        ids = torch.tensor(fingerprint_ids(self.model.config.get_text_config().vocab_size))
        prompts, responses = [ids[:5], ids[:5], ids[3:5]], [ids[5:9], ids[8:16], ids[9:12]]
        rows = Rows(Ragged.from_rows(prompts), Ragged.from_rows(responses))
        packed = rows.pack(range(len(prompts))).to(self.device)
        hidden_N = packed_forward(self.model, packed.ids_N, packed.positions_N, packed.layout)
        theirs = []
        for prompt, response in zip(prompts, responses, strict=True):
            sequence = torch.cat([prompt, response[:-1]]).unsqueeze(0).to(self.device)
            out = self.model.base_model(input_ids=sequence, use_cache=False)
            theirs.append(out.last_hidden_state[0, prompt.shape[0] - 1 :])
        theirs_M = torch.cat(theirs)
        return float((hidden_N[packed.gather_M] - theirs_M).abs().max() / theirs_M.abs().max())
