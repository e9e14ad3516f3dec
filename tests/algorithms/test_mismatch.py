"""Weights against the train/rollout mismatch: numbers by hand, and laws on ragged batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algorithms.mismatch import MismatchRules, MismatchWeights, mismatch_weights
from practicum.algorithms.policy_losses.registry import POLICY_LOSSES
from practicum.recipe.schema.algorithm_sections import Mismatch

from .batches import Batch, batches, law, with_more_masked_tokens, with_sessions_permuted

RATIOS = [0.5, 4.0, 1.0, 0.2, 0.8, 2.0]
SESSIONS = [0, 0, 1, 1, 2, 2]
"""Products of the sessions: 2, 0.2 and 1.6; geometric means: their roots, 1.414, 0.447 and 1.265."""
MASKED = 3
"""Where a token stands that a tool put in."""


def by_hand(**rules: Any) -> MismatchWeights:
    """Weights of those tokens, whose learner and engine logprobs differ by the ratios' logarithms."""
    rollout = torch.tensor([-3.0, -2.0, -1.0, -4.0, -0.5, -1.5], dtype=torch.float64)
    log_ratio = torch.tensor(RATIOS, dtype=torch.float64).log()
    insert = lambda x, value: torch.cat([x[:MASKED], x.new_tensor([value]), x[MASKED:]])  # noqa: E731
    return mismatch_weights(
        insert(rollout + log_ratio, torch.nan),
        insert(rollout, 7.0),
        insert(torch.ones(6), 0.0).bool(),
        insert(torch.tensor(SESSIONS), 1),
        MismatchRules(**rules),
    )


CASES = {
    "truncated tokens": (
        {"weights": "token", "cap": 1.5},
        [0.5, 1.5, 1.0, 0.2, 0.8, 1.5],
        {"mismatch_truncated": 2 / 6, "mismatch_weight": 5.5 / 6},
    ),
    "masked tokens": (
        {"weights": "token", "outside": "mask", "floor": 0.4, "cap": 3.0},
        [0.5, 0.0, 1.0, 0.0, 0.8, 2.0],
        {"mismatch_masked": 2 / 6, "mismatch_weight": 4.3 / 6},
    ),
    "tokens masked on one side": (
        {"weights": "token", "outside": "mask", "cap": 3.0},
        [0.5, 0.0, 1.0, 0.2, 0.8, 2.0],
        {"mismatch_masked": 1 / 6, "mismatch_weight": 4.5 / 6},
    ),
    "truncated sequences": (
        {"weights": "sequence", "cap": 1.8},
        [1.8, 1.8, 0.2, 0.2, 1.6, 1.6],
        {"mismatch_truncated": 2 / 6, "mismatch_weight": 7.2 / 6},
    ),
    "masked sequences": (
        {"weights": "sequence", "outside": "mask", "floor": 0.3, "cap": 1.7},
        [0.0, 0.0, 0.0, 0.0, 1.6, 1.6],
        {"mismatch_masked": 4 / 6, "mismatch_weight": 3.2 / 6},
    ),
    "rejected sessions": (
        {"reject": (0.5, 1.4)},
        [0.0, 0.0, 0.0, 0.0, 1.0, 1.0],
        {"mismatch_rejected": 2 / 3, "mismatch_weight": 2 / 6},
    ),
    "sessions rejected above alone": (
        {"reject": (0.0, 1.4)},
        [0.0, 0.0, 1.0, 1.0, 1.0, 1.0],
        {"mismatch_rejected": 1 / 3, "mismatch_weight": 4 / 6},
    ),
    "truncated tokens of sessions that are not rejected": (
        {"weights": "token", "cap": 1.5, "reject": (0.5, 1.42)},
        [0.5, 1.5, 0.0, 0.0, 0.8, 1.5],
        {"mismatch_truncated": 2 / 6, "mismatch_rejected": 1 / 3, "mismatch_weight": 4.3 / 6},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_computed_by_hand(name: str) -> None:
    rules, weights, stats = CASES[name]
    found = by_hand(**rules)
    expected = [*weights[:MASKED], 0.0, *weights[MASKED:]]
    assert found.weights_N.tolist() == pytest.approx(expected, rel=1e-12)
    assert found.stats == pytest.approx(stats, rel=1e-12)


def test_rules_have_the_recipe_s_names_and_defaults() -> None:
    ours, theirs = MismatchRules(), Mismatch()
    for name in ("weights", "outside", "cap", "floor", "reject"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("weights", "outside"):
        words = get_args(Mismatch.model_fields[name].annotation)
        assert {rules[name] for rules, *_ in CASES.values() if name in rules} <= set(words)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("outside", "above"), [("truncate", 2.0), ("mask", 0.0)])
def test_ratios_beyond_any_number_are_bounded(level: Any, outside: Any, above: float) -> None:
    old, sessions = torch.tensor([-1.0, -1.0, -2000.0, -2000.0]), torch.tensor([0, 0, 1, 1])
    everywhere, rules = torch.ones(4, dtype=torch.bool), MismatchRules(level, outside)
    found = mismatch_weights(old, old.flip(0), everywhere, sessions, rules)
    torch.testing.assert_close(found.weights_N, torch.tensor([above, above, 0.0, 0.0]))
    rejecting = replace(rules, reject=(0.0, 1e300))
    found = mismatch_weights(old, old.flip(0), everywhere, sessions, rejecting)
    assert found.weights_N.tolist() == [0.0] * 4
    assert found.stats["mismatch_rejected"] == 0.5


def test_nothing_sampled_has_no_weights_and_no_counts() -> None:
    none = torch.zeros(2, dtype=torch.bool)
    rules = MismatchRules("sequence", reject=(0.9, 1.1))
    found = mismatch_weights(torch.ones(2), torch.ones(2), none, torch.tensor([0, 1]), rules)
    assert found.weights_N.tolist() == [0.0, 0.0]
    assert found.stats == {}


RULES = st.builds(
    MismatchRules,
    weights=st.sampled_from(["off", "token", "sequence"]),
    outside=st.sampled_from(["truncate", "mask"]),
    cap=st.sampled_from([1.0, 1.3, 2.0, 50.0]),
    floor=st.sampled_from([0.0, 0.3, 1.0]),
    reject=st.sampled_from([None, (0.0, 1.2), (0.7, 1.5)]),
)


def weigh(batch: Batch, rules: MismatchRules) -> MismatchWeights:
    return mismatch_weights(
        batch.floats("logprob"), batch.floats("old"), batch.mask_N, batch.session_N, rules
    )


@law
@given(batch=batches(), rules=RULES)
def test_engines_that_agree_have_weights_of_exactly_one(batch: Batch, rules: MismatchRules) -> None:
    found = weigh(replace(batch, logprob=batch.old), rules)
    assert torch.equal(found.weights_N, batch.mask_N.double())
    assert all(count == (name == "mismatch_weight") for name, count in found.stats.items())


@law
@given(data=st.data(), batch=batches(), rules=RULES)
def test_weights_depend_on_neither_order_nor_masked_tokens(
    data: st.DataObject, batch: Batch, rules: MismatchRules
) -> None:
    found = weigh(batch, rules)
    more, places = data.draw(with_more_masked_tokens(batch))
    moved, order = data.draw(with_sessions_permuted(batch))
    for other, here, there in (
        (weigh(more, rules), found.weights_N, places),
        (weigh(moved, rules), found.weights_N[order], slice(None)),
    ):
        torch.testing.assert_close(other.weights_N[there], here, rtol=1e-12, atol=0)
        assert other.stats == pytest.approx(found.stats, rel=1e-12)


@law
@given(
    batch=batches(),
    rules=RULES,
    kind=st.sampled_from(sorted(POLICY_LOSSES)),
    dual_clip=st.sampled_from([None, 1.5]),
)
def test_a_weighed_advantage_weighs_every_policy_loss(
    batch: Batch, rules: MismatchRules, kind: str, dual_clip: float | None
) -> None:
    weights_N = weigh(replace(batch, logprob=batch.advantage), rules).weights_N
    assert math.isfinite(float(weights_N.sum()))
    inputs = batch.policy_inputs(dual_clip=dual_clip)
    plain_N = weights_N * POLICY_LOSSES[kind](inputs).loss_N
    weighed = replace(inputs, advantages_N=weights_N * inputs.advantages_N)
    weighed_N = POLICY_LOSSES[kind](weighed).loss_N
    torch.testing.assert_close(weighed_N, plain_N, rtol=1e-12, atol=1e-15)
    slopes = [torch.autograd.grad(x_N.sum(), inputs.logprobs_N)[0] for x_N in (weighed_N, plain_N)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-15)


def test_the_tokens_that_each_rule_held_are_told() -> None:
    held = by_hand(weights="token", outside="mask", floor=0.4, cap=3.0, reject=(0.5, 10.0)).held_N
    assert {rule: where.nonzero().squeeze(1).tolist() for rule, where in held.items()} == {
        "mismatch_mask": [1, 4],
        "mismatch_reject": [2, 4],
    }
    assert list(by_hand(weights="token", cap=1.5).held_N) == ["mismatch_truncate"]
