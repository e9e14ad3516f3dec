"""Advantage estimators: numbers by hand, slow references, and laws on ragged batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.algorithms.advantages import ADVANTAGES, AdvantageInputs, group_scores, whiten

from . import reference
from .batches import Batch, batches, law, with_more_masked_tokens, with_sessions_permuted

KINDS = sorted(ADVANTAGES)
GROUP_KINDS = ["dr_grpo", "grpo", "reinforce_pp_baseline", "rloo"]
# Dividing by a standard deviation near EPS magnifies the last digits of the scores by 1e6.
CLOSE: dict[str, Any] = {"rel": 1e-9, "abs": 1e-8}


def outcomes(groups: list[list[float]], length: int = 1) -> AdvantageInputs:
    """Sessions of `length` sampled tokens, each with its outcome at the last one."""
    scores = [x for group in groups for x in group]
    rewards = torch.zeros(len(scores), length, dtype=torch.float64)
    rewards[:, -1] = torch.tensor(scores, dtype=torch.float64)
    return AdvantageInputs(
        token_rewards_N=rewards.flatten(),
        mask_N=torch.ones(rewards.numel(), dtype=torch.bool),
        session_N=torch.arange(len(scores)).repeat_interleave(length),
        group_S=torch.tensor([g for g, group in enumerate(groups) for _ in group]),
    )


def one_session(rewards: list[float], mask: list[bool] | None = None, **more: Any) -> AdvantageInputs:
    return AdvantageInputs(
        token_rewards_N=torch.tensor(rewards, dtype=torch.float64),
        mask_N=torch.tensor(mask or [True] * len(rewards)),
        session_N=torch.zeros(len(rewards), dtype=torch.int64),
        group_S=torch.tensor([0]),
        **more,
    )


def test_remax_by_hand() -> None:
    inputs = one_session(
        [-0.1, 9.0, -0.2, 1.0],
        mask=[True, False, True, True],
        baseline_S=torch.tensor([0.5], dtype=torch.float64),
    )
    assert ADVANTAGES["remax"](inputs).advantages_N.tolist() == pytest.approx([0.2, 0, 0.3, 0.5])


def gae_inputs(whiten: bool) -> AdvantageInputs:
    """Three sampled tokens with a masked one between, whose reward and value must not matter."""
    return one_session(
        [0.0, 5.0, 0.0, 1.0],
        mask=[True, False, True, True],
        values_N=torch.tensor([0.5, 9.0, 0.6, 0.7], dtype=torch.float64),
        gamma=0.9,
        lam=0.8,
        whiten=whiten,
    )


def test_gae_by_hand() -> None:
    found = ADVANTAGES["gae"](gae_inputs(whiten=False))
    assert found.advantages_N.tolist() == pytest.approx([0.21712, 0, 0.246, 0.3])
    assert found.returns_N is not None
    assert found.returns_N.tolist() == pytest.approx([0.71712, 0, 0.846, 1.0])


def test_gae_whitens_advantages_but_not_returns() -> None:
    plain, white = ADVANTAGES["gae"](gae_inputs(False)), ADVANTAGES["gae"](gae_inputs(True))
    sampled = white.advantages_N[[0, 2, 3]]
    assert sampled.mean().item() == pytest.approx(0, abs=1e-12)
    assert sampled.std().item() == pytest.approx(1, abs=1e-4)
    assert white.advantages_N[1] == 0
    assert white.returns_N is not None
    assert plain.returns_N is not None
    assert torch.equal(white.returns_N, plain.returns_N)


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_a_flat_group_has_exactly_no_advantage(kind: str) -> None:
    # The float mean of three times 0.1 is not 0.1; as lengths differ, the batch's mean is not 0.
    inputs = outcomes([[0.1, 0.1, 0.1], [1, 0, 0]], length=3)
    inputs.mask_N[-1] = inputs.mask_N[-2] = False
    found = ADVANTAGES[kind](inputs)
    assert found.advantages_N[:9].tolist() == [0.0] * 9
    assert (found.advantages_N[9:-2] != 0).all()
    assert found.stats == {"groups": 2, "groups_of_one": 0, "flat_groups": 1}


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_a_group_of_one_has_exactly_no_advantage(kind: str) -> None:
    inputs = outcomes([[5], [1, 0], [2, 3]], length=2)
    inputs.mask_N[-2:] = False  # the last group is down to one: its other session sampled nothing
    inputs.mask_N[2] = False
    found = ADVANTAGES[kind](inputs)
    assert (found.advantages_N[3:6] != 0).all()
    assert found.advantages_N[[0, 1, 2, 6, 7, 8, 9]].tolist() == [0.0] * 7
    assert found.stats == {"groups": 3, "groups_of_one": 2, "flat_groups": 0}


def test_a_session_without_sampled_tokens_is_in_no_group_statistic() -> None:
    inputs = outcomes([[1, 0, 7]])
    inputs.mask_N[2] = False
    scores = group_scores(inputs)
    assert scores.size_S.tolist() == [2, 2, 2]
    assert scores.centred_S.tolist() == [0.5, -0.5, 0]


@pytest.mark.parametrize("values", [[], [3.0], [0.1, 0.1, 0.1]])
def test_whitening_what_does_not_vary_gives_zeros(values: list[float]) -> None:
    values_N = torch.tensor([*values, 8.0], dtype=torch.float64)
    mask_N = torch.tensor([True] * len(values) + [False])
    assert whiten(values_N, mask_N).tolist() == [0.0] * (len(values) + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_is_fine(kind: str) -> None:
    found = ADVANTAGES[kind](Batch([], [], [], [], [], [], [], group=[], baseline=[]).advantage_inputs())
    assert found.advantages_N.tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_number_type_is_kept(kind: str, dtype: torch.dtype) -> None:
    inputs = AdvantageInputs(
        token_rewards_N=torch.tensor([0.0, 1.0, 0.5], dtype=dtype),
        mask_N=torch.ones(3, dtype=torch.bool),
        session_N=torch.tensor([0, 0, 1]),
        group_S=torch.tensor([0, 0]),
        baseline_S=torch.zeros(2, dtype=dtype),
        values_N=torch.zeros(3, dtype=dtype),
    )
    assert ADVANTAGES[kind](inputs).advantages_N.dtype == dtype


@given(batch=batches(), gamma=st.floats(0.5, 1), lam=st.floats(0, 1), whiten=st.booleans())
@law
def test_advantages_follow_their_formulas(batch: Batch, gamma: float, lam: float, whiten: bool) -> None:
    for kind in KINDS:
        found = ADVANTAGES[kind](batch.advantage_inputs(gamma, lam, whiten))
        expected = reference.advantages(batch, kind, gamma, lam, whiten)
        assert found.advantages_N.tolist() == pytest.approx(expected, **CLOSE), kind


@given(batch=batches(), gamma=st.floats(0.5, 1), lam=st.floats(0, 1))
@law
def test_only_gae_gives_returns_and_they_follow_their_formula(batch: Batch, gamma: float, lam: float) -> None:
    for kind in KINDS:
        found = ADVANTAGES[kind](batch.advantage_inputs(gamma, lam)).returns_N
        assert (found is not None) == (kind == "gae")
        if found is not None:
            _, targets = reference.gae(batch, gamma, lam)
            assert found.tolist() == pytest.approx(targets, **CLOSE)


@given(batch=batches())
@law
def test_groups_without_signal_are_counted(batch: Batch) -> None:
    sizes = {g: len(reference.members(batch, g)) for g in set(batch.group)}
    flat = [g for g, n in sizes.items() if n > 1 and not reference.has_signal(batch, g)]
    for kind in GROUP_KINDS:
        assert ADVANTAGES[kind](batch.advantage_inputs()).stats == {
            "groups": sum(n > 0 for n in sizes.values()),
            "groups_of_one": sum(n == 1 for n in sizes.values()),
            "flat_groups": len(flat),
        }, kind


@given(data=st.data(), batch=batches())
@law
def test_masked_tokens_change_not_one_bit(data: st.DataObject, batch: Batch) -> None:
    more, kept = data.draw(with_more_masked_tokens(batch))
    for kind in KINDS:
        before = ADVANTAGES[kind](batch.advantage_inputs(0.9, 0.8))
        after = ADVANTAGES[kind](more.advantage_inputs(0.9, 0.8))
        assert torch.equal(after.advantages_N[kept], before.advantages_N), kind
        assert after.stats == before.stats, kind
        if before.returns_N is not None and after.returns_N is not None:
            assert torch.equal(after.returns_N[kept], before.returns_N)


@given(data=st.data(), batch=batches())
@law
def test_the_order_of_sessions_does_not_matter(data: st.DataObject, batch: Batch) -> None:
    moved, order = data.draw(with_sessions_permuted(batch))
    for kind in KINDS:
        before = ADVANTAGES[kind](batch.advantage_inputs(0.9, 0.8))
        after = ADVANTAGES[kind](moved.advantage_inputs(0.9, 0.8))
        expected = before.advantages_N[order].tolist()
        assert after.advantages_N.tolist() == pytest.approx(expected, **CLOSE), kind
        assert after.stats == before.stats, kind
