"""What the checks say when they fire, made by making them fire."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from practicum.checks import invariants
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Ragged
from practicum.learning.optimizer import OptimizerStepper
from practicum.recipe.schema.recipe import Train
from practicum.teachers.ledger import Ledger

Sentence = tuple[str, str | None]


def check_sentences() -> list[Sentence]:
    """(name in the recipe, example of its sentence)."""
    tags = Tags(prompt_tokens=9, response_tokens=6, sampled_tokens=6, version_min=6, version_max=6)
    batch = BatchRef("train", (Key(40, 2),), (tags,))
    ids, mask = torch.zeros(9, dtype=torch.int64), torch.tensor([True] * 5 + [False])
    columns = (Ragged.from_rows([ids]), Ragged.from_rows([ids[:6]]), Ragged.from_rows([mask]))
    rewarded = BatchRef(
        "train", (Key(40, 1), Key(40, 2)), (replace(tags, reward=0.0), replace(tags, reward=1.0))
    )
    masks = Ragged.from_rows([mask, mask])
    ledger = Ledger({"chat": {"gradient_share": 0.009, "prompts_share": 0.2}}, {})
    gap = {"gap_mean": 0.21, "gap_max": 3.4}
    return [
        ("weight_version", invariants.weight_version(batch, 7)),
        ("fingerprint", invariants.fingerprint([-1.0], [-1.31], 1e-3, ([-1.0], [-1.0]))),
        ("groups", invariants.groups(batch, 8)),
        ("masks", invariants.masks(batch, *columns)),
        ("masks", invariants.passes(batch, [[]], 1)),
        ("masks", invariants.denominator(4096.0, 4100)),
        ("masks", invariants.loss_weights(4.0, 1.0)),
        ("advantages", invariants.advantages(rewarded, Ragged.from_rows([ids[:6].double()] * 2), masks)),
        ("logprob_gap", invariants.logprob_gap(gap, 0.05)),
        ("sample_size", invariants.sample_size({"sample_size": 0.31}, 0.5)),
        ("finite", _nonfinite()),
        ("teacher_shares", ledger.starved(None)),
        ("store_empty", invariants.store_empty(held=8)),
    ]


def _nonfinite() -> str:
    said: list[str] = []
    weight = torch.nn.Parameter(torch.ones(1))
    stepper = OptimizerStepper([weight], Train(), on_nonfinite=said.append)
    weight.grad = torch.full((1,), math.nan)
    assert not stepper.step(1e-4, {"loss": 0.3, "tokens": 4096.0})
    return said[0]
