"""Logprobs of given responses, without gradient: the student's, or a reference policy's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from practicum.dataplane.ragged import Ragged
from practicum.learning.logprobs import token_logprobs
from practicum.learning.packed_model import PackedModel
from practicum.learning.packing import Packed, RowSpans
from practicum.learning.row_extras import RowExtras
from practicum.models.fingerprint import LENGTH, fingerprint_ids


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """One float32 number for every response token."""

    logprobs: Ragged
    entropy: Ragged | None
    plain: Ragged | None
    """Logprobs at temperature 1."""


class LogprobScorer:
    """Scores responses under a model."""

    def __init__(self, trunk: PackedModel) -> None:
        self.trunk = trunk

    @torch.no_grad()
    def logprobs(
        self,
        prompt_ids: Ragged,
        response_ids: Ragged,
        *,
        temperature: float,
        entropy: bool = False,
        plain: bool = False,
        extras: RowExtras | None = None,
    ) -> LogprobColumns:
        """Logprobs of every response token at a temperature; entropy and temperature-1 logprobs if asked."""
        trunk, rows = self.trunk, RowSpans(prompt_ids, response_ids, extras)
        wanted = {"logprobs_M": True, "entropy_M": entropy, "plain_M": plain}
        tokens = sum(response_ids.lengths)
        columns = {name: torch.empty(tokens) for name, on in wanted.items() if on}

        def score(packed: Packed) -> None:
            with trunk.precision():
                found = token_logprobs(
                    trunk.model,
                    trunk.hidden(packed),
                    packed.target_M,
                    temperature=temperature,
                    entropy=entropy,
                    plain=plain,
                )
            for name, column in columns.items():
                column[packed.column_M] = getattr(found, name).float().cpu()

        trunk.each(trunk.microbatches(rows), score)

        def ragged(name: str) -> Ragged | None:
            return Ragged.packed(columns[name], response_ids.lengths) if name in columns else None

        logprobs = ragged("logprobs_M")
        assert logprobs is not None
        return LogprobColumns(logprobs, ragged("entropy_M"), ragged("plain_M"))

    def fingerprint(self, length: int = LENGTH) -> Tensor:
        """Logprobs [length - 1] of a fixed sequence, float32, by which weights are compared."""
        ids = torch.tensor(fingerprint_ids(self.trunk.model.config.get_text_config().vocab_size, length))
        prompt, response = (Ragged.from_rows([part]) for part in (ids[:1], ids[1:]))
        return self.logprobs(prompt, response, temperature=1.0).logprobs.values
