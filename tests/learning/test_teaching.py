"""What the student takes from its teachers, through the learner's update."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier
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
from practicum.learning.update_shares import PIECE, PartGradients, PartShares
from practicum.observe.metrics import METRICS
from practicum.recipe.checks.divergences import why_dead
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.recipe import Train

from ..algorithms.batches import PAIRS
from .distilled import OTHERS, STUDENT, plain_gradient, take_taught, taught, teaching
from .reference import VOCAB, Updated, padded_tokens, random_batch, with_shared_beginnings
from .updates import assert_same, learn

EXACT = 1e-9
TRAIN = Train(lr=0.01, optimizer="tests.learning.optimizers:steady", max_grad_norm=None)
LIVE = [pair for pair in PAIRS if why_dead(*pair, "loss") is None and pair[1] != "shared"]
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
    batch = taught(with_shared_beginnings(random_batch(seed)), temperature=compared_at)
    if shares is not None and not both_have_tokens(batch):
        shares = None
    how = teaching(divergence, signal, temperature=compared_at, weight=0.7, shares=shares)
    expected = plain_gradient(how, batch, aggregation=aggregation)
    order = list(range(len(batch.sessions)))
    random.shuffle(order)
    chosen = algorithm(aggregation=aggregation)
    mine = update(take_taught(batch, order), how, algorithm=chosen, temperature=sampled_at, budget=budget)
    assert_gradient(mine, *expected)


@pytest.mark.parametrize(("divergence", "signal"), [("reverse_kl", "top_k"), ("k2", "sampled")])
def test_a_teachers_weight_is_a_factor_of_its_divergence_alone(divergence: str, signal: str):
    batch, how = taught(random_batch(5)), teaching(divergence, signal)
    assert batch.teachers is not None
    drawn = torch.rand(sum(batch.response_ids.lengths), generator=torch.Generator().manual_seed(1))
    weight = Ragged.packed(drawn * (drawn > 0.3), batch.response_ids.lengths)
    weighed = replace(batch, teachers=replace(batch.teachers, weight=weight))
    assert_gradient(update(weighed, how), *plain_gradient(how, weighed))
    both = teaching(divergence, signal, alone=False)
    nothing = Ragged.packed(torch.zeros_like(drawn), weight.lengths)
    unheard = replace(batch, teachers=replace(batch.teachers, weight=nothing))
    alone, _ = learn(STUDENT, replace(batch, teachers=None, groups=None), TRAIN, algorithm())
    assert difference(update(unheard, both).grads, alone.grads) <= EXACT * size(alone.grads)


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
    how = teaching("k1", "sampled", apply_as="advantage", alone=False)
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
def test_gradients_of_the_groups_are_those_of_their_rows_in_the_loss_of_the_whole(divergence, signal):
    batch = taught(random_batch(22, groups=4))
    how = teaching(divergence, signal, shares={0: 0.3, 1: 0.7})
    assert batch.groups is not None
    mine, other = (Learner(copy.deepcopy(STUDENT), TRAIN, algorithm(), teaching=how) for _ in range(2))
    metrics = mine.update(batch, groups=(0, 1, 2))
    assert mine.shares is not None
    rows = [[i for i, n in enumerate(batch.groups) if n == number] for number in (0, 1)]
    parts = [plain_gradient(how, batch, only=own)[1] for own in rows]
    gram = [[sum(float((a[n] * b[n]).sum()) for n in a) for b in parts] for a in parts]
    assert [row[:2] for row in mine.shares.gram[:2]] == [pytest.approx(row, rel=EXACT) for row in gram]
    assert mine.shares.gram[2] == [0.0] * 3
    assert metrics == pytest.approx(other.update(batch), rel=EXACT, abs=EXACT)
    weights = dict(other.named_weights())
    for name, weight in mine.named_weights():
        torch.testing.assert_close(weight, weights[name], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("max_grad_norm", [None, 0.01])
def test_shares_are_those_of_the_optimizers_step_and_add_up_with_the_rest(max_grad_norm):
    train = Train(lr=0.01, max_grad_norm=max_grad_norm, weight_decay=0.1)
    how = teaching("reverse_kl", "full")
    mine = Learner(copy.deepcopy(STUDENT), train, algorithm(), teaching=how)
    mine.update(taught(random_batch(24)))
    batch = taught(random_batch(25, groups=4))
    assert batch.groups is not None
    names = dict(mine.model.named_parameters())
    start = copy.deepcopy(mine.model)
    before = {name: p.detach() for name, p in start.named_parameters()}
    first = {name: mine.stepper.optimizer.state[p]["exp_avg"].clone() for name, p in names.items()}
    whole: dict[str, torch.Tensor] = {}

    def keep(_: object) -> None:
        whole.update({name: p.grad.clone() for name, p in names.items() if p.grad is not None})

    mine.update(batch, groups=(0, 1), before_step=keep)
    assert mine.shares is not None
    change = {name: p.detach() - before[name] for name, p in names.items()}
    total = sum(float(x.square().sum()) for x in change.values())

    def share(step: dict[str, torch.Tensor]) -> float:
        return sum(float((step[name] * change[name]).sum()) for name in names) / total

    denominator = {}
    for name, p in names.items():
        state = mine.stepper.optimizer.state[p]
        assert float(state["step"]) == 2
        denominator[name] = (state["exp_avg_sq"] / (1 - 0.999**2)).sqrt() + 1e-8
    # AdamW's step by its formula, from the moment before and the clipped gradient.
    adam = {n: -0.01 * (0.9 * first[n] + 0.1 * whole[n]) / (1 - 0.9**2) / denominator[n] for n in names}
    asked = {n: -0.01 * whole[n] / denominator[n] for n in names}
    decay = {n: -0.01 * 0.1 * before[n] if before[n].ndim >= 2 else 0 * before[n] for n in names}
    rest, shares = mine.shares.rest, mine.shares.shares
    assert sum(shares) + sum(rest.values()) == pytest.approx(1.0, abs=1e-12)
    assert rest["decay"] == pytest.approx(share(decay), abs=1e-9)
    assert sum(shares) + rest["clipping"] == pytest.approx(share(asked), abs=1e-6)
    assert (rest["clipping"] != 0) == (max_grad_norm is not None)
    assert rest["momentum"] == pytest.approx(share(adam) - share(asked), abs=1e-6)
    for number in (0, 1):
        alone = gradient_of_group(start, how, batch, number)
        part = {n: -0.01 * alone[n] / denominator[n] for n in names}
        assert shares[number] == pytest.approx(share(part), abs=1e-6)


def gradient_of_group(model, how, batch, number):
    """The gradient of a group's rows in the loss of the whole batch: others have no sampled tokens."""
    other = Learner(copy.deepcopy(model), Train(max_grad_norm=None), algorithm(), teaching=how)
    rows = zip(batch.groups, batch.response_mask.rows, strict=True)
    masks = [mask if group == number else torch.zeros_like(mask) for group, mask in rows]
    kept = sum(int(mask.sum()) for mask in masks) / int(batch.response_mask.values.sum())
    grads: dict[str, torch.Tensor] = {}
    named = dict(other.model.named_parameters())

    def keep(_: object) -> None:
        grads.update({n: kept * p.grad for n, p in named.items() if p.grad is not None})

    other.update(replace(batch, response_mask=Ragged.from_rows(masks)), before_step=keep)
    return grads


def test_a_share_of_the_gradient_misleads_where_a_share_of_the_update_does_not():
    # One teacher's gradient is all in a coordinate that has always been steep, and so hardly moves.
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.0, 0.999), weight_decay=0.0)
    for _ in range(3000):
        weight.grad = torch.tensor([100.0, 0.0], dtype=torch.float64)
        optimizer.step()
        optimizer.zero_grad()
    parts = PartGradients([weight])
    for gradient in ([9.0, 0.0], [0.0, 1.0]):
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        parts.take()
    parts.put_sum()
    parts.begin_step(optimizer)
    optimizer.step()
    found = parts.end_step(optimizer, 0.1, 1.0)
    norms = [found.gram[i][i] ** 0.5 for i in (0, 1)]
    assert norms[0] / sum(norms) == pytest.approx(0.9)
    assert found.shares[0] < 0.01
    assert found.shares[1] > 0.99
    assert sum(found.shares) + sum(found.rest.values()) == pytest.approx(1.0, abs=1e-12)


def _shares_of(weight: torch.Tensor, gradients: list[torch.Tensor], gather: Any = None) -> PartShares:
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1)
    parts = PartGradients([parameter], gather)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        parts.take()
    parts.put_sum()
    parts.begin_step(optimizer)
    optimizer.step()
    return parts.end_step(optimizer, 0.1, 1.0)


def test_shares_of_shards_are_those_of_the_whole():
    torch.manual_seed(4)
    size = 3 * PIECE + 7  # several pieces, and a rest
    weight, *gradients = torch.randn(4, size, dtype=torch.float64)
    cut, barrier, told = PIECE + 11, Barrier(2, timeout=60), {}

    def rank(number: int) -> PartShares:
        def gather(numbers: list[float]) -> list[list[float]]:
            told[number] = numbers
            barrier.wait()
            return [told[0], told[1]]

        here = slice(0, cut) if number == 0 else slice(cut, size)
        return _shares_of(weight[here], [gradient[here] for gradient in gradients], gather)

    with ThreadPoolExecutor(2) as pool:
        shards = list(pool.map(rank, range(2)))
    whole = _shares_of(weight, gradients)
    for found in shards:
        assert found.shares == pytest.approx(whole.shares, rel=EXACT)
        assert found.rest == pytest.approx(whole.rest, rel=EXACT, abs=EXACT)
        assert found.gram == [pytest.approx(row, rel=EXACT) for row in whole.gram]
    stacked = torch.stack(gradients)
    assert whole.gram == [pytest.approx(row, rel=EXACT) for row in (stacked @ stacked.T).tolist()]


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_projected_step_is_the_nearest_that_makes_no_part_worse(dtype):
    torch.manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(50, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1)
    for _ in range(3):
        weight.grad = torch.randn(50, dtype=dtype)
        optimizer.step()
    optimizer.zero_grad()
    one = torch.randn(50, dtype=dtype)
    gradients = [one, -0.9 * one + 0.2 * torch.randn(50, dtype=dtype), torch.randn(50, dtype=dtype)]
    before, plain = weight.detach().clone(), copy.deepcopy((weight, optimizer.state_dict()))
    parts = PartGradients([weight], project=True)
    for gradient in gradients:
        weight.grad = gradient.clone()
        parts.take()
    parts.put_sum()
    assert weight.grad is not None
    whole = weight.grad.clone()
    parts.begin_step(optimizer)
    optimizer.step()
    found = parts.end_step(optimizer, 0.01, 1.0)
    step = weight.detach() - before
    other = torch.optim.AdamW([plain[0]], lr=0.01, weight_decay=0.1)
    other.load_state_dict(plain[1])
    plain[0].grad = whole
    other.step()
    wished = plain[0].detach() - before
    matrix = torch.stack(gradients)
    cosines = (matrix @ step) / (matrix.norm(dim=1) * step.norm())
    assert ((matrix @ wished) / (matrix.norm(dim=1) * wished.norm())).max() > 1e-3
    assert cosines.max() <= 2e-6
    # The nearest one: what was removed is a sum of gradients with weights >= 0, of those at the constraint.
    weights = torch.linalg.lstsq(matrix.T.double(), (wished - step).double().unsqueeze(1)).solution.squeeze(1)
    torch.testing.assert_close(matrix.T.double() @ weights, (wished - step).double(), rtol=0, atol=1e-6)
    assert weights.min() >= -1e-5
    assert bool(((weights < 1e-5) | (cosines.double() > -1e-4)).all())
    assert sum(found.shares) + sum(found.rest.values()) == pytest.approx(1.0, abs=1e-12)
    assert "projection" in found.rest
