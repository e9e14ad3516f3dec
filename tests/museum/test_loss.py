"""The loss is divided by the wrong number, or is of the wrong tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from practicum.algorithms.aggregation import token_weights
from practicum.algorithms.losses import POLICY_LOSSES, PolicyInputs, PolicyTerms
from practicum.dataplane import columns
from practicum.dataplane.ragged import Ragged
from practicum.errors import CheckError, RecipeErrors
from practicum.learning import learner as learner_module
from practicum.learning.logprobs import LogprobScorer
from practicum.learning.packing import Packed, RowSpans
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.padding import BatchCutter

from ..trainer.recipes import tiny
from .steps import passes, take_steps


def test_a_loss_that_depends_on_its_micro_batches(monkeypatch: pytest.MonkeyPatch):
    """allenai/open-instruct#1161, huggingface/trl#3021: each micro-batch was divided by its own tokens, so
    rows of small ones counted more."""
    assert passes("small")
    columns_of = learner_module._Update.columns_of

    def by_itself(update: Any, packed: Packed) -> dict[str, Tensor]:
        columns = columns_of(update, packed)
        return columns | {"weights": columns["weights"] / columns["weights"].sum()}

    monkeypatch.setattr(learner_module._Update, "columns_of", by_itself)
    with pytest.raises(CheckError, match=r"check masks: the token weights of the loss sum to"):
        take_steps("small")


def test_a_loss_that_is_divided_by_every_token(monkeypatch: pytest.MonkeyPatch):
    """verl-project/verl#3741: the divisor was the width of the padded mask; the loss grew with the rows."""
    assert passes("agent")

    def of_all(kind: str, mask_M: Tensor, session_M: Tensor, *, sessions: int, **_: Any) -> Tensor:
        return token_weights(kind, torch.ones_like(mask_M), session_M, sessions).masked_fill(~mask_M, 0.0)

    monkeypatch.setattr(learner_module, "token_weights", of_all)
    with pytest.raises(CheckError, match=r"check masks: the token weights of the loss sum to"):
        take_steps("agent")


def test_padding_rows_that_are_counted(monkeypatch: pytest.MonkeyPatch):
    """verl-project/verl#7771: rows that fill a batch up were in the means of metrics, so the gap between
    engine and learner looked smaller than it was."""
    assert passes("padded")
    microbatches = RowSpans.microbatches

    def of_all_tokens(spans: RowSpans, *args: Any, sampled_M: Tensor | None, **more: Any) -> Iterator[Packed]:
        return microbatches(spans, *args, **more)

    monkeypatch.setattr(columns, "_TAGS", replace(columns._TAGS, is_padding=False))
    monkeypatch.setattr(RowSpans, "microbatches", of_all_tokens)
    with pytest.raises(CheckError, match=r"check masks: the loss counted \d+ sampled tokens, the batch has"):
        take_steps("padded")


def test_rows_at_the_end_that_are_dropped(monkeypatch: pytest.MonkeyPatch):
    """NVIDIA-NeMo/labs-molt#113: samples that did not fill a last mini-batch were not learnt from."""
    assert passes("padded")
    steps = BatchCutter.optimizer_steps
    monkeypatch.setattr(BatchCutter, "optimizer_steps", lambda *args: steps(*args)[:-1])
    with pytest.raises(CheckError, match=r"check masks: .* is in 0 optimizer steps of its batch, expected 1"):
        take_steps("padded")


def test_nan_times_zero(monkeypatch: pytest.MonkeyPatch):
    """PrimeIntellect-ai/prime-rl#2084, OpenRLHF/OpenRLHF#1240, NVIDIA-NeMo/RL#4120: a ratio that overflowed
    was masked by a product with 0, which is not a number; the weights were lost."""
    logprobs = LogprobScorer.logprobs

    def one_is_stale(*args: Any, **how: Any) -> Ragged:
        found = logprobs(*args, **how)
        if "extras" not in how:  # the fingerprint of a sync
            return found
        values = found.values.clone()
        values[0] = -1000.0
        return Ragged.packed(values, found.lengths)

    monkeypatch.setattr(LogprobScorer, "logprobs", one_is_stale)
    assert take_steps("old", 1)

    def masked_by_a_product(inputs: PolicyInputs) -> PolicyTerms:
        log_ratio_N = inputs.logprobs_N - inputs.old_logprobs_N
        kept_N = (log_ratio_N < 10).float()
        return PolicyTerms(-kept_N * log_ratio_N.exp() * inputs.advantages_N, {})

    monkeypatch.setitem(POLICY_LOSSES, "ppo_clip", masked_by_a_product)
    with pytest.raises(CheckError, match=r"check finite: update of \d+ tokens: loss is nan"):
        take_steps("old", 1)


def test_a_temperature_that_the_learner_does_not_know(monkeypatch: pytest.MonkeyPatch):
    """huggingface/trl#4159, PrimeIntellect-ai/prime-rl#697: logprobs of engine and learner were at different
    temperatures."""
    assert passes("cool")
    make = learner_module.Learner.__init__

    def at_one(learner: Any, *args: Any, temperature: float, **more: Any) -> None:
        make(learner, *args, temperature=1.0, **more)

    monkeypatch.setattr(learner_module.Learner, "__init__", at_one)
    with pytest.raises(CheckError, match=r"check logprob_gap: rollout and learner logprobs differ"):
        take_steps("cool")


def test_a_ratio_to_a_distribution_that_was_cut(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    """huggingface/trl#6789, modelscope/ms-swift#8442: under top-p the engine's logprobs are of what top-p
    left, the learner's are of everything: their ratio is never 1."""
    cut = {"rollout": {"top_p": 0.7, "samples": 2, "max_new_tokens": 4}}
    with pytest.raises(RecipeErrors, match=r"algorithm.old_logprobs: found rollout with top_p"):
        tiny(tmp_path, **cut, algorithm={"old_logprobs": "rollout"})
    assert tiny(tmp_path, **cut)
    assert passes("cut")
    monkeypatch.setattr(Recipe, "cuts_sampling", False)
    with pytest.raises(CheckError, match=r"check logprob_gap: rollout and learner logprobs differ"):
        take_steps("cut")


def test_a_kl_whose_gradient_does_not_know_the_reference(tmp_path: Any):
    """OpenRLHF/OpenRLHF#1309, NVIDIA-NeMo/RL#2506, allenai/open-instruct#534: the gradient of k1 as a loss is
    0 on average, and the penalty held nothing back."""
    loss = {"kl": {"place": "loss", "estimator": "k1"}}
    assert tiny(tmp_path, algorithm={"kl": loss["kl"] | {"estimator": "k2"}})
    with pytest.raises(RecipeErrors, match=r"algorithm.kl.estimator: found k1 with algorithm.kl.place loss"):
        tiny(tmp_path, algorithm=loss)
