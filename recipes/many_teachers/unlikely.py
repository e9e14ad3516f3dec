"""A control without teachers: unlikely tokens get a fixed negative advantage, whatever they are."""

import math

import torch

from practicum.parts import BatchRef, Columns, Ragged, StepInfo, stage

UNLIKELY = math.log(0.2)
"""Tokens that the student sampled with a lower logprob are pushed down."""


@stage(after="advantages", reads=["plain_logprobs", "advantages"], writes=["advantages"])
def unlikely(rank, batch: BatchRef, columns: Columns, step: StepInfo):
    """Set the advantage of unlikely tokens to -1, of all others to 0 (arXiv:2608.31046)."""
    logprobs = columns.ragged("plain_logprobs")
    return {"advantages": Ragged.packed(-(logprobs.values < UNLIKELY).to(torch.float32), logprobs.lengths)}
