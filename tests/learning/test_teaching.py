"""What the student takes from its teachers, through the learner's update."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from practicum.dataplane.ragged import Ragged
from practicum.errors import DataError
from practicum.learning import learner as learner_module
from practicum.learning.learner import Learner
from practicum.learning.logprobs import token_logprobs
from practicum.learning.objective import share_factors
from practicum.learning.update_batch import UpdateBatch
from practicum.observe.metrics import METRICS
from practicum.recipe.checks.divergences import why_dead
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train

from ..algorithms.batches import PAIRS
from .distilled import OTHERS, STUDENT, plain_gradient, take_taught, taught, teaching
from .reference import VOCAB, Updated, padded_tokens, random_batch
from .updates import assert_same, learn

EXACT = 1e-9
TRAIN = Train(lr=0.01, eps=1e-3, clip_norm=None)
LIVE = [pair for pair in PAIRS if why_dead(*pair, "loss") is None]
AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")
every_pair = pytest.mark.parametrize(("divergence", "signal"), LIVE, ids=lambda name: str(name))


def algorithm(**more: Any) -> Algorithm:
    return Algorithm(**more)


def update(batch: UpdateBatch, how: Any, **more: Any) -> Updated:
    """One update of the student by its teachers."""
    return learn(STUDENT, batch, TRAIN, more.pop("algorithm", algorithm()), teaching=how, **more)[0]


def size(grads: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in grads.values()))


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Size of the difference of two gradients."""
    return size({name: a[name] - b[name] for name in a})


def assert_gradient(mine: Updated, loss: float, grads: dict[str, torch.Tensor]) -> None:
    assert mine.loss == pytest.approx(loss, rel=EXACT, abs=EXACT)
    assert mine.grads.keys() == grads.keys()
    assert difference(mine.grads, grads) <= EXACT * max(1.0, size(grads))


@every_pair
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])
@given(
    seed=st.integers(0, 10**6),
    aggregation=st.sampled_from(AGGREGATIONS),
    budget=st.sampled_from([1, 12, 40, 10**6]),
    sampled_at=st.sampled_from([1.0, 0.7]),
    compared_at=st.sampled_from([1.0, 0.7, 1.6]),
    shares=st.sampled_from([None, {0: 0.25, 1: 0.75}]),
    random=st.randoms(use_true_random=False),
)
def test_the_gradient_is_that_of_the_formula_under_any_cut_and_order(
    divergence, signal, seed, aggregation, budget, sampled_at, compared_at, shares, random
):
    batch = taught(random_batch(seed), temperature=compared_at)
    if shares is not None and not both_have_tokens(batch):
        shares = None
    how = teaching(divergence, signal, temperature=compared_at, weight=0.7, shares=shares)
    expected = plain_gradient(how, batch, aggregation=aggregation)
    order = list(range(len(batch.sessions)))
    random.shuffle(order)
    chosen = algorithm(aggregation=aggregation)
    mine = update(take_taught(batch, order), how, algorithm=chosen, temperature=sampled_at, budget=budget)
    assert_gradient(mine, *expected)


def both_have_tokens(batch: UpdateBatch) -> bool:
    assert batch.groups is not None
    rows = zip(batch.groups, batch.response_mask.rows, strict=True)
    return {number for number, mask in rows if mask.any()} == {0, 1}


@every_pair
def test_the_whole_update_does_not_depend_on_the_cut(divergence, signal):
    batch = taught(random_batch(11, groups=4))
    how = teaching(divergence, signal)
    whole = update(batch, how)
    order = list(reversed(range(len(batch.sessions))))
    assert_same(update(take_taught(batch, order), how, budget=15), whole, EXACT)


@every_pair
def test_logits_in_chunks_give_the_same_update(divergence, signal, monkeypatch):
    batch, how = taught(random_batch(12), temperature=1.3), teaching(divergence, signal, temperature=1.3)
    whole = update(batch, how)
    chunked = partial(token_logprobs, chunk_logits=3 * VOCAB)
    monkeypatch.setattr(learner_module, "token_logprobs", chunked)
    assert_same(update(batch, how), whole, 1e-12)


@every_pair
def test_a_teacher_that_is_the_student_gives_no_loss_and_no_gradient(divergence, signal, monkeypatch):
    same = (STUDENT, STUDENT)
    how = teaching(divergence, signal, teachers=same)
    batch = taught(random_batch(13), same)
    if divergence == "abs":  # its slope is ±1 right beside 0, so the student must be met bit for bit
        with monkeypatch.context() as patch:
            batch = _with_the_updates_own_logprobs(batch, patch)
    mine = update(batch, how)
    assert abs(mine.loss) < EXACT
    assert size(mine.grads) < EXACT


def _with_the_updates_own_logprobs(batch: UpdateBatch, patch: pytest.MonkeyPatch) -> UpdateBatch:
    """The batch with the logprobs that an update itself computes as the teacher's."""
    assert batch.teachers is not None
    own_M = torch.zeros_like(batch.teachers.logprobs.values)
    place = Ragged.packed(torch.arange(len(own_M), dtype=own_M.dtype), batch.response_ids.lengths)
    whole = learner_module.token_losses

    def keep(found: Any, columns: Any, *more: Any) -> Any:
        own_M[columns["teacher_logprobs"].long()] = found.logprobs_M.detach()
        return whole(found, columns, *more)

    patch.setattr(learner_module, "token_losses", keep)
    update(replace(batch, teachers=replace(batch.teachers, logprobs=place)), teaching("abs", "sampled"))
    logprobs = Ragged.packed(own_M, batch.response_ids.lengths)
    return replace(batch, teachers=replace(batch.teachers, logprobs=logprobs))


@every_pair
def test_another_teacher_gives_another_gradient(divergence, signal):
    batch = random_batch(14)
    one = update(taught(batch), teaching(divergence, signal))
    other = update(taught(batch, OTHERS), teaching(divergence, signal, teachers=OTHERS))
    assert difference(one.grads, other.grads) > 0.01 * size(one.grads)


@every_pair
def test_what_teachers_say_of_tokens_that_were_not_sampled_does_not_count(divergence, signal):
    batch = taught(random_batch(15))
    given = batch.teachers
    assert given is not None
    hidden = ~batch.response_mask.values
    assert hidden.any()

    def spoilt(column: Ragged | None, value: float) -> Ragged:
        assert column is not None
        values = column.values.clone()
        values[hidden] = value
        return Ragged.packed(values, column.lengths)

    bad = replace(
        given,
        logprobs=spoilt(given.logprobs, math.nan),
        topk_ids=spoilt(given.topk_ids, 0),
        topk_logprobs=spoilt(given.topk_logprobs, math.nan),
        hidden=spoilt(given.hidden, math.nan),
    )
    how = teaching(divergence, signal)
    assert_same(update(replace(batch, teachers=bad), how), update(batch, how), 0.0)


@every_pair
def test_rewards_and_teachers_add_up_with_the_weight_of_the_teachers(divergence, signal):
    batch = taught(random_batch(16, flat_groups=1))
    policy, _ = learn(STUDENT, batch, TRAIN, algorithm())
    alone = update(batch, teaching(divergence, signal))
    both = update(batch, teaching(divergence, signal, alone=False, weight=0.3))
    assert both.loss == pytest.approx(policy.loss + 0.3 * alone.loss, rel=EXACT)
    added = {name: policy.grads[name] + 0.3 * alone.grads[name] for name in policy.grads}
    assert difference(both.grads, added) <= EXACT * max(1.0, size(added))


def test_where_teachers_enter_by_the_advantage_the_loss_is_the_policys_alone():
    batch = taught(random_batch(17))
    policy, _ = learn(STUDENT, batch, TRAIN, algorithm())
    how = teaching("k1", "sampled", through="advantage", alone=False)
    mine, metrics = learn(STUDENT, batch, TRAIN, algorithm(), teaching=how)
    assert_same(mine, policy, 0.0)
    assert "distill_loss" not in metrics
    assert "teacher_kl" in metrics


def test_metrics_of_distillation_are_documented():
    batch = taught(random_batch(18))
    _, free = learn(STUDENT, batch, TRAIN, algorithm(), teaching=teaching("reverse_kl", "full"))
    assert {"distill_loss", "teacher_kl", "teacher_overlap"} <= free.keys()
    assert {f"train/{name}" for name in free} <= METRICS.keys()


@given(
    weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=20),
    shares=st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4),
    data=st.data(),
)
def test_shares_move_weight_between_teachers_and_leave_the_total(weights, shares, data):
    weights_M = torch.tensor(weights, dtype=torch.float64)
    number = st.lists(st.integers(0, 3), min_size=len(weights), max_size=len(weights))
    teacher_M = torch.tensor(data.draw(number))
    wanted = {i: share / sum(shares) for i, share in enumerate(shares)}
    shared_M = weights_M * share_factors(weights_M, teacher_M, wanted)[teacher_M]
    assert float(shared_M.sum()) == pytest.approx(float(weights_M.sum()), rel=1e-12)
    present = set(teacher_M.tolist())
    for i in present:
        target = wanted[i] / sum(wanted[j] for j in present)
        assert float(shared_M[teacher_M == i].sum() / shared_M.sum()) == pytest.approx(target, rel=1e-12)
        within = shared_M[teacher_M == i] / weights_M[teacher_M == i]
        assert float(within.max() - within.min()) == pytest.approx(0.0, abs=1e-12)


def test_shares_of_the_loss_are_what_the_recipe_asks_for():
    batch = taught(random_batch(19, groups=4))
    mine = Learner(copy.deepcopy(STUDENT), TRAIN, algorithm(), teaching=teaching("k2", "sampled"))
    mine.update(batch)
    plain = {number: sums["weight"] for number, sums in mine.by_group.sums.items()}
    assert sum(plain.values()) == pytest.approx(1.0)
    assert plain[0] != pytest.approx(0.9, abs=0.05)
    how = teaching("k2", "sampled", shares={0: 0.9, 1: 0.1})
    mine = Learner(copy.deepcopy(STUDENT), TRAIN, algorithm(), teaching=how)
    mine.update(batch)
    shared = {number: sums["weight"] for number, sums in mine.by_group.sums.items()}
    assert shared == {0: pytest.approx(0.9), 1: pytest.approx(0.1)}


def test_a_teacher_without_rows_leaves_its_share_to_the_others():
    batch = taught(random_batch(20, groups=1))
    assert batch.groups is not None
    assert set(batch.groups) == {0}
    how = teaching("k2", "sampled", shares={0: 0.2, 1: 0.8})
    assert_same(update(batch, how), update(batch, teaching("k2", "sampled")), 1e-12)


def test_the_sums_of_each_teacher_are_those_of_its_tokens():
    batch = taught(random_batch(21))
    assert batch.teachers is not None
    mine = Learner(copy.deepcopy(STUDENT), TRAIN, algorithm(), teaching=teaching("reverse_kl", "full"))
    own = padded_tokens(copy.deepcopy(STUDENT), batch, temperature=1.0)
    assert batch.groups is not None
    metrics = mine.update(batch)
    lengths = torch.tensor(batch.response_ids.lengths)
    number_M = torch.tensor(batch.groups).repeat_interleave(lengths)
    kl_M = own.logprobs.detach() - batch.teachers.logprobs.values
    for number in (0, 1):
        mine_M = (number_M == number) & batch.response_mask.values
        sums = mine.by_group.sums[number]
        assert mine.by_group.tokens[number] == int(mine_M.sum())
        assert sums["kl"] == pytest.approx(float(kl_M[mine_M].sum()), abs=1e-5)
        assert sums["entropy"] == pytest.approx(float(own.entropy[mine_M].sum()), abs=1e-5)
    assert sum(s["loss"] for s in mine.by_group.sums.values()) == pytest.approx(metrics["loss"])
    overlap = sum(s["overlap"] for s in mine.by_group.sums.values()) / metrics["tokens"]
    assert overlap == pytest.approx(metrics["teacher_overlap"])
    gap = sum(s["entropy_gap"] for s in mine.by_group.sums.values()) / metrics["tokens"]
    assert gap == pytest.approx(metrics["teacher_entropy_gap"])


@every_pair
def test_gradient_norms_are_those_of_each_part_in_the_loss_of_the_whole(divergence, signal):
    batch = taught(random_batch(22, groups=4))
    how = teaching(divergence, signal, shares={0: 0.3, 1: 0.7})
    numbers = batch.groups
    assert numbers is not None
    parts = [[i for i, n in enumerate(numbers) if n == number] for number in (0, 1)]
    mine = Learner(copy.deepcopy(STUDENT), TRAIN, algorithm(), teaching=how)
    got = mine.gradient_norms(batch, [*parts, [], list(range(len(numbers)))])
    expected = [size(plain_gradient(how, batch, only=rows)[1]) for rows in parts]
    whole = size(plain_gradient(how, batch)[1])
    assert got == pytest.approx([*expected, 0.0, whole], rel=EXACT)


def test_measuring_gradients_leaves_no_trace():
    batch, how = taught(random_batch(23)), teaching("jsd", "top_k")
    mine = Learner(copy.deepcopy(STUDENT), TRAIN, algorithm(), teaching=how)
    other = Learner(copy.deepcopy(STUDENT), TRAIN, algorithm(), teaching=how)
    mine.gradient_norms(batch, [[0, 1], [2]])
    assert all(p.grad is None for p in mine.model.parameters())
    assert not mine.stepper.optimizer.state
    assert mine.update(batch) == other.update(batch)
    weights = dict(other.named_weights())
    assert all(torch.equal(w, weights[name]) for name, w in mine.named_weights())


@pytest.mark.parametrize(
    ("signal", "lost"), [("top_k", "topk_ids"), ("top_k", "topk_logprobs"), ("full", "hidden")]
)
def test_what_a_signal_needs_is_named_if_it_is_missing(signal, lost):
    batch = taught(random_batch(24))
    assert batch.teachers is not None
    without = replace(batch, teachers=replace(batch.teachers, **{lost: None}))
    with pytest.raises(DataError, match=f"teacher_{lost}"):
        update(without, teaching("reverse_kl", signal))
    with pytest.raises(DataError, match="teacher_logprobs"):
        update(replace(batch, teachers=None), teaching("reverse_kl", signal))


def test_scores_of_other_lengths_than_the_responses_are_refused():
    batch = taught(random_batch(25))
    given = batch.teachers
    assert given is not None
    short = Ragged.from_rows([*given.logprobs.rows[:-1], torch.zeros(77, dtype=torch.float64)])
    with pytest.raises(DataError, match="teacher_logprobs"):
        update(replace(batch, teachers=replace(given, logprobs=short)), teaching("k2", "sampled"))
