"""From hidden states to logprobs, a chunk of the vocabulary-wide logits at a time, and the logprobs of given
responses without gradient, the student's or a reference policy's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from practicum.algorithms.token_logprobs import log_distribution, scaled_logits
from practicum.cpu.batch_invariance import ROWS
from practicum.dataplane.ragged import Ragged
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import RowExtras, RowSpans
from practicum.models.attention import head_logits
from practicum.models.fingerprint import LENGTH, fingerprint_ids
from practicum.models.lora import adapter_off
from practicum.recipe.counts import CHUNK_LOGITS

Reduce = Callable[[Tensor, slice], tuple[Tensor, ...]]
"""From a chunk's logits [C, V] and the slice of tokens it covers, to tensors [C, ...]."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of the targets; entropy of the distribution; logprobs at temperature 1. All [M]. `more` is the
    result of `also`, `top` the most likely tokens and their logprobs at the wanted targets."""

    logprobs_M: Tensor
    entropy_M: Tensor | None
    plain_M: Tensor | None
    more: tuple[Tensor, ...] = ()
    top: tuple[Tensor, ...] = ()

    def select(self, mask_M: Tensor) -> TokenLogprobs:
        """Return those of some targets; `top`, and what `more` has beyond four columns, stay whole."""
        entropy_M, plain_M = (None if x is None else x[mask_M] for x in (self.entropy_M, self.plain_M))
        more = (*(x[mask_M] for x in self.more[:4]), *self.more[4:])
        return TokenLogprobs(self.logprobs_M[mask_M], entropy_M, plain_M, more, self.top)


def map_logits(
    model: PreTrainedModel, hidden_M: Tensor, reduce: Reduce, *, chunk_logits: int = CHUNK_LOGITS
) -> tuple[Tensor, ...]:
    """Apply `reduce` to the logits of hidden states [M, hidden], M > 0, without ever holding [M, V].

    Logits come as float32, or float64 if the model is. Under gradient, chunks are computed again in the
    backward pass.
    """

    def chunk(hidden_C: Tensor, rows: slice) -> tuple[Tensor, ...]:
        return reduce(scaled_logits(head_logits(model, hidden_C), 1.0), rows)

    tokens = hidden_M.shape[0]
    size = max(ROWS, chunk_logits // model.config.get_text_config().vocab_size)
    if size >= tokens:
        return chunk(hidden_M, slice(0, tokens))

    def recomputed(hidden_C: Tensor, rows: slice) -> tuple[Tensor, ...]:
        out = checkpoint(chunk, hidden_C, rows, use_reentrant=False, preserve_rng_state=False)
        return cast(tuple[Tensor, ...], out)

    run = recomputed if torch.is_grad_enabled() else chunk
    slices = [slice(i, min(i + size, tokens)) for i in range(0, tokens, size)]
    parts = [run(hidden_M[rows], rows) for rows in slices]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def token_logprobs(
    model: PreTrainedModel,
    hidden_M: Tensor,
    target_M: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_grad: bool = False,
    plain: bool = False,
    logprobs_grad: bool = True,
    also: Reduce | None = None,
    top: tuple[Tensor, int] | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> TokenLogprobs:
    """Return logprobs of the targets under logits / temperature; entropy and plain logprobs if asked.

    Gradients flow through the logprobs if `logprobs_grad`, through the entropy if `entropy_grad`, never
    through plain. `also` makes further tensors [C, ...] of the same logits. `top` is a mask of targets, and
    the number of most likely tokens to return for each of them.
    """
    fixed = not (logprobs_grad or entropy_grad)

    def reduce(logits_CV: Tensor, rows: slice) -> tuple[Tensor, ...]:
        target_C1 = target_M[rows].unsqueeze(1)
        own_CV = logits_CV.detach() if fixed else logits_CV
        scaled_CV = scaled_logits(own_CV, temperature)
        all_CV = log_distribution(scaled_CV)
        out = [all_CV.gather(1, target_C1).squeeze(1)]
        if entropy:
            for_entropy_CV = all_CV if entropy_grad else all_CV.detach()
            out.append(-(for_entropy_CV.exp() * for_entropy_CV).sum(-1))
        if plain:
            plain_CV = all_CV if temperature == 1.0 else log_distribution(logits_CV.detach())
            out.append(plain_CV.detach().gather(1, target_C1).squeeze(1))
        if top is not None:
            wanted_C, count = top[0][rows], min(top[1], all_CV.shape[1])
            best = all_CV.detach()[wanted_C].topk(count)
            out += [best.indices, best.values]
        del all_CV, scaled_CV  # what `also` needs comes on top
        return (*out, *(also(logits_CV, rows) if also is not None else ()))

    logprobs_M, *more = map_logits(model, hidden_M, reduce, chunk_logits=chunk_logits)
    entropy_M = more.pop(0) if entropy else None
    plain_M = more.pop(0) if plain else None
    best = (more.pop(0), more.pop(0)) if top is not None else ()
    return TokenLogprobs(logprobs_M, entropy_M, plain_M, tuple(more), best)


class LogprobScorer:
    """Scores responses under a model, or under its base if `adapter` is False."""

    def __init__(self, trunk: PackedModel, *, adapter: bool = True) -> None:
        self.trunk, self.adapter = trunk, adapter

    @torch.no_grad()
    def logprobs(
        self,
        prompt_ids: Ragged,
        response_ids: Ragged,
        *,
        temperature: float,
        extras: RowExtras | None = None,
    ) -> Ragged:
        """Return logprobs of every response token at a temperature, in float32."""
        return self._scored(prompt_ids, response_ids, temperature, extras)

    @torch.no_grad()
    def entropies(
        self,
        prompt_ids: Ragged,
        response_ids: Ragged,
        *,
        temperature: float,
        extras: RowExtras | None = None,
    ) -> Ragged:
        """Return the entropy of the distribution that each response token is drawn from, in float32."""
        return self._scored(prompt_ids, response_ids, temperature, extras, entropy=True)

    def _scored(
        self,
        prompt_ids: Ragged,
        response_ids: Ragged,
        temperature: float,
        extras: RowExtras | None,
        *,
        entropy: bool = False,
        mixed: bool = True,
    ) -> Ragged:
        trunk, rows = self.trunk, RowSpans(prompt_ids, response_ids, extras)
        column = torch.empty(sum(response_ids.lengths))
        for attempt in trunk.attempts():
            base = nullcontext() if self.adapter else adapter_off(trunk.model)
            with attempt, base, trunk.precision(mixed=mixed):
                for packed in trunk.microbatches(rows):
                    scored = token_logprobs(
                        trunk.model,
                        trunk.hidden(packed),
                        packed.target_M,
                        temperature=temperature,
                        entropy=entropy,
                    )
                    scores_M = scored.entropy_M if entropy else scored.logprobs_M
                    assert scores_M is not None
                    column[packed.column_M] = scores_M.float().cpu()
        return Ragged.packed(column, response_ids.lengths)

    @torch.no_grad()
    def fingerprint(self, length: int = LENGTH) -> Tensor:
        """Return logprobs [length - 1] of a fixed sequence, float32, by which weights are compared. They are
        computed in the weights' dtype, as an engine does: autocast would hide small differences."""
        ids = torch.tensor(fingerprint_ids(self.trunk.model.config.get_text_config().vocab_size, length))
        prompt, response = (Ragged.from_rows([part]) for part in (ids[:1], ids[1:]))
        return self._scored(prompt, response, 1.0, None, mixed=False).values
