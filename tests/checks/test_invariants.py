import pytest
import torch

from practicum.checks import invariants
from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.ragged import Ragged
from practicum.errors import CheckError
from practicum.recipe.schema.recipe import Checks


def batch(*tags: Tags) -> BatchRef:
    return BatchRef("train", tuple(Key(0, i) for i in range(len(tags))), tags)


def test_fresh_rows_must_have_the_learners_weight_version():
    assert invariants.weight_version(batch(Tags(sampled_tokens=1, version_min=5, version_max=5)), 5) is None
    mixed = batch(Tags(sampled_tokens=1, version_min=4, version_max=5))
    assert "weight versions 4–5" in (invariants.weight_version(mixed, 5) or "")
    newer = batch(Tags(sampled_tokens=1, version_min=5, version_max=5))
    assert "the step is of version 4" in (invariants.weight_version(newer, 4) or "")


def test_logprob_gap_names_the_number_and_the_limit():
    assert invariants.logprob_gap({"gap_mean": 0.01}, 0.05) is None
    assert invariants.logprob_gap({}, 0.05) is None
    finding = invariants.logprob_gap({"gap_mean": 0.2, "gap_max": 1.5}, 0.05)
    assert finding is not None
    assert "0.2 nats" in finding
    assert "1.5" in finding


def test_masks_must_agree_with_tags():
    ids = Ragged.from_rows([torch.zeros(2, dtype=torch.int64)])
    response = Ragged.from_rows([torch.zeros(3, dtype=torch.int64)])
    mask = Ragged.from_rows([torch.tensor([True, False, True])])
    good = batch(Tags(prompt_tokens=2, response_tokens=3, sampled_tokens=2))
    assert invariants.masks(good, ids, response, mask) is None
    bad = batch(Tags(prompt_tokens=2, response_tokens=3, sampled_tokens=3))
    assert "2 sampled tokens" in (invariants.masks(bad, ids, response, mask) or "")


def test_denominator_must_be_the_batchs_sampled_tokens():
    assert invariants.denominator(5.0, 5) is None
    assert "counted 4" in (invariants.denominator(4.0, 5) or "")


def test_the_weights_of_a_loss_must_add_up():
    assert invariants.loss_weights(0.999, 1.0) is None
    assert "sum to 2, expected 1" in (invariants.loss_weights(2.0, 1.0) or "")
    assert "expected 12.5" in (invariants.loss_weights(12.0, 12.5) or "")
    assert invariants.loss_weights(float("nan"), 1.0) is not None


def test_every_sampled_row_must_be_in_every_pass():
    rows = batch(Tags(sampled_tokens=1), Tags(), Tags(sampled_tokens=2))
    assert invariants.passes(rows, [[0, 1], [2], [2, 0]], 2) is None
    assert "session 2/trajectory 0 is in 1 optimizer steps" in (
        invariants.passes(rows, [[0], [2, 0]], 2) or ""
    )
    assert "is in 3 optimizer steps of its batch, expected 2" in (invariants.passes(rows, [[0] * 3], 2) or "")


def of_group(rewards: list[float | None], advantages: list[list[float]], rows: list[int]) -> str | None:
    """What is found of one prompt's sessions; `rows` tells which of them each row is of."""
    keys = tuple(Key(7, session, number) for number, session in enumerate(rows))
    tags = tuple(Tags(reward=rewards[session]) for session in rows)
    values = Ragged.from_rows([torch.tensor(row) for row in advantages])
    mask = Ragged.from_rows([torch.tensor(row) != 9.0 for row in advantages])  # 9 stands for a tool's token
    return invariants.advantages(BatchRef("train", keys, tags), values, mask)


def test_advantages_must_agree_with_rewards():
    assert of_group([1.0, 0.0], [[0.7, 9.0, 0.7], [-0.7]], [0, 1]) is None
    assert "session 0 has the reward 1" in (of_group([1.0, 0.0], [[-0.7], [0.7]], [0, 1]) or "")
    assert "its advantage is 0" in (of_group([1.0, 0.0], [[0.0], [0.0]], [0, 1]) or "")
    assert "its advantage is nan" in (of_group([1.0], [[float("nan")]], [0]) or "")
    assert of_group([0.5, 0.5 + 1e-7], [[0.0], [0.0]], [0, 1]) is None


def test_advantages_of_a_group_must_add_up_to_0_over_its_sessions():
    assert of_group([1.0, 0.0], [[0.5], [0.5, 0.5], [-0.5]], [0, 0, 1]) is None
    finding = of_group([1.0, 0.0], [[0.25], [0.25, 0.25], [-0.75]], [0, 0, 1]) or ""
    assert "the advantages of prompt 7's 2 sessions add up to -0.5, expected 0" in finding


def test_groups_with_a_row_that_earned_without_a_token_are_left_out():
    assert of_group([1.0, 0.0], [[-0.7], [9.0]], [0, 1]) is None
    assert of_group([1.0, None], [[-0.7], [0.7]], [0, 1]) is None


def test_groups_must_be_whole():
    assert invariants.groups(batch(Tags(), Tags()), 2) is None
    assert "has 2 sessions, expected 3" in (invariants.groups(batch(Tags(), Tags()), 3) or "")


def test_store_must_hold_only_what_waits():
    assert invariants.store_empty(0) is None
    assert "3 rows of finished steps are in the store" in (invariants.store_empty(3) or "")


def test_levels_decide_what_a_finding_does():
    said: list[str] = []
    with pytest.raises(CheckError, match="check groups: broken"):
        Watch(Checks(), said.append)("groups", "broken")
    watch = Watch(Checks(level="warn"), said.append)
    watch("groups", "broken")
    assert said == ["check groups: broken"]
    assert watch.fired == {"groups": 1}
    Watch(Checks(level="off"), said.append)("groups", "broken")
    assert len(said) == 1


OLD, NEW = [-1.0, -2.0, -3.0], [-1.1, -2.2, -3.3]


def test_equal_fingerprints_pass_and_others_are_stale_or_corrupt():
    assert invariants.fingerprint(NEW, NEW, 1e-3) is None
    assert invariants.fingerprint([-1.1, -2.2005, -3.3], NEW, 1e-3) is None
    finding = invariants.fingerprint([-1.1, -2.5, -3.3], NEW, 1e-3) or ""
    assert finding.startswith("stale or corrupt weights: ")
    assert "0.1 nats per token" in finding
    assert "at most 0.001 is expected" in finding
    assert "inf nats" in (invariants.fingerprint([-1.1, float("nan"), -3.3], NEW, 1e-3) or "")


def test_one_token_may_be_off_by_rounding():
    expected = [-12.0] * 47
    assert invariants.fingerprint([-12.00115, *expected[1:]], expected, 1e-3) is None
    assert invariants.fingerprint([one - 1.1e-3 for one in expected], expected, 1e-3) is not None


def test_a_fingerprint_of_before_is_told_as_such():
    assert "before the update" in (invariants.fingerprint(OLD, NEW, 1e-3, (OLD, OLD)) or "")
    near = [-1.0000001, -2.0, -3.0]
    assert "before the update" in (invariants.fingerprint(near, NEW, 1e-3, (OLD, OLD)) or "")
    assert invariants.fingerprint(OLD, OLD, 1e-3, (OLD, OLD)) is None  # nothing was learnt


def test_a_skipped_update_is_found_within_the_limit_too():
    moved = [one - 1e-5 for one in OLD]
    assert "before the update" in (invariants.fingerprint(OLD, moved, 1e-3, (OLD, OLD)) or "")
    followed = [one - 1.2e-5 for one in OLD]
    assert invariants.fingerprint(followed, moved, 1e-3, (OLD, OLD)) is None


def test_a_gap_of_the_last_token_alone_is_the_prefix_caches():
    finding = invariants.fingerprint([-1.1, -2.2, -3.1], NEW, 1e-3, ([-1.0, -2.0, -3.1], OLD)) or ""
    assert "prefix cache is of older weights" in finding
    many = [-5.0] * 47
    assert "prefix cache" in (invariants.fingerprint([*many[1:], -5.006], many, 1e-3) or "")
