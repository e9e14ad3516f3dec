import math

import pytest
import torch

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.ragged import Ragged
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.advantages import AdvantageRole
from practicum.roles.reward import at_last_sampled, sampled_runs
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import make_plan


def recipe(**algorithm: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "t",
            "model": {"random_init": {}},
            "tasks": {"sort": {"kind": "sort"}},
            "rollout": {"samples": 2},
            "algorithm": algorithm,
        }
    )


def role_of(r: Recipe, store: MemoryStore) -> AdvantageRole:
    return AdvantageRole(r.algorithm, r.distill, r.reward.weight, make_plan(r), store, Watch(r.checks, print))


def filled(store: MemoryStore, rewards: list[float], lengths: list[int], **columns: Ragged) -> BatchRef:
    keys = tuple(Key(i // 2, i % 2) for i in range(len(rewards)))
    tags = tuple(
        Tags(reward=r, response_tokens=n, sampled_tokens=n) for r, n in zip(rewards, lengths, strict=True)
    )
    batch = BatchRef("train", keys, tags)
    total = sum(lengths)
    ids = Ragged.packed(torch.zeros(total, dtype=torch.int64), lengths)
    mask = Ragged.packed(torch.ones(total, dtype=torch.bool), lengths)
    store.put(
        batch,
        {
            "response_ids": ids,
            "response_mask": mask,
            "reward_tokens": at_last_sampled(torch.tensor(rewards), mask),
            **columns,
        },
    )
    return batch


def test_a_reward_stands_at_the_last_sampled_token_of_its_row():
    rewards = torch.tensor([2.0, 3.0, 5.0, 7.0])
    mask = Ragged.packed(torch.tensor([True, True, False, True, False]), [3, 1, 1, 0])
    placed = at_last_sampled(rewards, mask)
    assert placed.values.tolist() == [0.0, 2.0, 0.0, 3.0, 0.0]
    assert placed.lengths == mask.lengths


def test_turns_are_runs_of_sampled_tokens():
    ids = torch.tensor([5, 6, 7, 8, 9, 10])
    mask = torch.tensor([True, True, False, True, False, False])
    assert [run.tolist() for run in sampled_runs(ids, mask)] == [[5, 6], [8]]
    assert sampled_runs(ids[:0], mask[:0]) == []


def test_grpo_advantages_are_group_relative_and_constant_over_a_response():
    store, r = MemoryStore(), recipe()
    batch = filled(store, [1.0, 0.0, 1.0, 1.0], [2, 1, 1, 2])
    role_of(r, store).advantages(StepInfo(batch, baselines={}))
    got = store.get(batch, ["advantages"])["advantages"]
    assert isinstance(got, Ragged)
    half = 0.5 / (0.5**0.5 + 1e-6)
    torch.testing.assert_close(got.values, torch.tensor([half, half, -half, 0.0, 0.0, 0.0]))


def test_remax_subtracts_the_greedy_reward_of_the_prompt():
    store, r = MemoryStore(), recipe(advantage="remax")
    batch = filled(store, [1.0, 0.0], [1, 1])
    role_of(r, store).advantages(StepInfo(batch, baselines={0: 0.25}))
    got = store.get(batch, ["advantages"])["advantages"]
    assert isinstance(got, Ragged)
    assert got.values.tolist() == [0.75, -0.25]


def test_kl_in_the_reward_is_weighted_and_adapts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("practicum.roles.advantages.KL_HORIZON", 100)
    kl = {"place": "reward", "coefficient": 0.5, "estimator": "k1", "target": 0.1}
    store, r = MemoryStore(), recipe(advantage="remax", kl=kl)
    old = Ragged.packed(torch.tensor([-1.0, -1.0, -1.0]), [2, 1])
    ref = Ragged.packed(torch.tensor([-1.5, -1.0, -2.0]), [2, 1])
    batch = filled(store, [1.0, 0.0], [2, 1], old_logprobs=old, ref_logprobs=ref)
    credit = role_of(r, store)
    stats = credit.advantages(StepInfo(batch, baselines={0: 0.0}))
    got = store.get(batch, ["advantages"])["advantages"]
    assert isinstance(got, Ragged)
    # returns from each token on: 1 - 0.5·(0.5 + 0), 1 - 0.5·0, and 0 - 0.5·1
    torch.testing.assert_close(got.values, torch.tensor([0.75, 1.0, -0.5]))
    assert stats is not None
    assert stats["kl_reward"] == 0.5
    assert credit.kl.coefficient == pytest.approx(0.5 * (1 + 0.2 * 2 / 100))
    other = role_of(r, store)
    other.kl.load_state_dict(credit.kl.state_dict())
    assert other.kl.coefficient == credit.kl.coefficient


def taught(through: str, weight: float, **algorithm: object) -> Recipe:
    given = recipe(**algorithm).model_dump()
    given["reward"]["weight"] = weight
    given["teachers"] = {"t": {"model": "x"}}
    given["distill"] = {"divergence": "k1", "signal": "sampled", "apply_as": through, "weight": 0.5}
    return Recipe.model_validate(given)


def advantages_of(r: Recipe, baselines: dict[int, float] | None = None) -> list[float]:
    """Two sessions of one prompt, of one token each: rewards 1 and 0, log-ratios to the teacher 2 and 0."""
    store = MemoryStore()
    one = [1, 1]
    columns = {
        "old_logprobs": Ragged.packed(torch.tensor([-1.0, -1.0]), one),
        "teacher_logprobs": Ragged.packed(torch.tensor([-3.0, -1.0]), one),
        "ref_logprobs": Ragged.packed(torch.tensor([-1.0, -5.0]), one),
    }
    batch = filled(store, [1.0, 0.0], one, **columns)
    role_of(r, store).advantages(StepInfo(batch, baselines=baselines or {}))
    got = store.get(batch, ["advantages"])["advantages"]
    assert isinstance(got, Ragged)
    return got.values.tolist()


def test_teachers_alone_give_each_token_minus_its_log_ratio():
    assert advantages_of(taught("advantage", 0.0)) == [-1.0, 0.0]


def test_the_tasks_advantage_has_the_rewards_weight_beside_the_teachers():
    mixed = advantages_of(taught("advantage", 0.25, advantage="dr_grpo"))
    assert mixed == pytest.approx([0.25 * 0.5 - 1.0, 0.25 * -0.5])


def test_among_rewards_only_the_tasks_has_the_rewards_weight():
    kl = {"place": "reward", "coefficient": 0.1, "estimator": "k1"}
    rewards = [0.25 * 1.0 - 0.5 * 2.0, 0.25 * 0.0 - 0.1 * 4.0]
    got = advantages_of(taught("reward", 0.25, advantage="dr_grpo", kl=kl))
    middle = sum(rewards) / 2
    assert got == pytest.approx([rewards[0] - middle, rewards[1] - middle])


def test_remax_weighs_its_baseline_like_the_reward():
    got = advantages_of(taught("reward", 0.5, advantage="remax"), baselines={0: 1.0})
    assert got == pytest.approx([0.5 * 1.0 - 1.0 - 0.5 * 1.0, 0.0 - 0.5])


def weighed(mismatch: str, log_ratios: list[float]) -> tuple[list[float], dict[str, float]]:
    """Two sessions of one prompt, the first of two trajectories; rewards 1 and 0, tokens 2 + 1 and 1."""
    store, r = MemoryStore(), recipe(advantage="dr_grpo", mismatch=mismatch)
    rows, lengths = [Key(0, 0, 0), Key(0, 0, 1), Key(0, 1)], [2, 1, 1]
    batch = BatchRef("train", tuple(rows), tuple(Tags(response_tokens=n, sampled_tokens=n) for n in lengths))
    rollout = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    columns = {
        "response_mask": torch.ones(4, dtype=torch.bool),
        "reward_tokens": torch.tensor([0.0, 0.0, 1.0, 0.0]),
        "rollout_logprobs": rollout,
        "old_logprobs": rollout + torch.tensor(log_ratios),
    }
    store.put(batch, {name: Ragged.packed(column, lengths) for name, column in columns.items()})
    stats = role_of(r, store).advantages(StepInfo(batch, baselines={}))
    got = store.get(batch, ["advantages"])["advantages"]
    assert isinstance(got, Ragged)
    assert stats is not None
    return got.values.tolist(), {name: x for name, x in stats.items() if name.startswith("mismatch")}


def test_advantages_are_weighed_by_the_ratio_of_learner_and_engine():
    half, third = math.log(0.5), math.log(3.0)
    ratios = [half, third, half, 0.0]  # products 0.75 and 1, geometric means 0.909 and 1
    got, stats = weighed("token", ratios)
    assert got == pytest.approx([0.25, 1.0, 0.25, -0.5])
    assert stats == pytest.approx({"mismatch_weight": 1.0, "mismatch_truncated": 0.25})
    got, stats = weighed("sequence", ratios)
    assert got == pytest.approx([0.375, 0.375, 0.375, -0.5]), "a session's trajectories are one sequence"


@pytest.mark.parametrize("weights", ["token", "sequence"])
def test_an_engine_that_agrees_with_the_learner_changes_no_bit_of_the_advantages(weights: str):
    got, stats = weighed(weights, [0.0] * 4)
    assert got == weighed("off", [0.0] * 4)[0]
    assert stats.pop("mismatch_weight") == 1.0
    assert set(stats.values()) == {0.0}


def test_teachers_advantages_are_weighed_and_returns_are_not():
    mismatch = "token"
    columns = {
        "old_logprobs": Ragged.packed(torch.tensor([-1.0, -1.0]), [1, 1]),
        "rollout_logprobs": Ragged.packed(torch.tensor([-1.0 + math.log(2.0), -1.0]), [1, 1]),
        "teacher_logprobs": Ragged.packed(torch.tensor([-3.0, -2.0]), [1, 1]),
        "values": Ragged.packed(torch.tensor([0.5, 0.25]), [1, 1]),
    }
    found = {}
    for name, r in {
        "teachers": taught("advantage", 0.0, mismatch=mismatch),
        "critic": recipe(advantage="gae", mismatch=mismatch),
    }.items():
        store = MemoryStore()
        batch = filled(store, [1.0, 0.0], [1, 1], **columns)
        role_of(r, store).advantages(StepInfo(batch, baselines={}))
        written = store.get(batch, ["advantages", *(["returns"] if name == "critic" else [])])
        found |= {
            f"{name} {field}": c.values.tolist() for field, c in written.items() if isinstance(c, Ragged)
        }
    assert found["teachers advantages"] == pytest.approx([0.5 * 0.5 * -2.0, 0.5 * -1.0])
    white = 0.5**0.5  # 0.5 and -0.25, whitened
    assert found["critic advantages"] == pytest.approx([0.5 * white, -white], rel=1e-5)
    assert found["critic returns"] == pytest.approx([1.0, 0.0])
