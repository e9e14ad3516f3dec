"""A session is one sample of its prompt, however many trajectories it left."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from practicum.algorithms.advantages import ADVANTAGES
from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.ragged import Column, Ragged
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.advantages import AdvantageRole
from practicum.roles.reward import at_last_sampled
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import make_plan

KINDS = [(name, place) for name in ADVANTAGES for place in ("off", "reward")]


@dataclass(frozen=True)
class Turn:
    """A given piece, then a sampled one."""

    given: int
    sampled: int
    cut: bool
    """Whether a trajectory begins with it in the split form."""


@dataclass(frozen=True)
class Played:
    prompt: int
    reward: float
    turns: tuple[Turn, ...]


turns = st.lists(st.builds(Turn, st.integers(0, 3), st.integers(1, 4), st.booleans()), min_size=1, max_size=4)
sessions = st.lists(
    st.builds(Played, st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0]), turns.map(tuple)),
    min_size=1,
    max_size=9,
)


def recipe(advantage: str, place: str) -> Recipe:
    kl = {"place": place} | ({"coefficient": 0.3, "estimator": "k1"} if place == "reward" else {})
    steps = {"lam": 0.8} if advantage == "gae" else {}
    return Recipe.model_validate(
        {
            "name": "t",
            "model": {"random_init": {}},
            "tasks": {"sort": {"kind": "sort"}},
            "algorithm": {"advantage": advantage, "kl": kl, **steps},
            "critic": {} if advantage == "gae" else None,
        }
    )


def rows_of(session: Played, split: bool) -> list[list[Turn]]:
    rows: list[list[Turn]] = []
    for turn in session.turns:
        if not rows or (split and turn.cut):
            rows.append([])
        rows[-1].append(turn)
    return rows


def advantages(asked: Recipe, played: list[Played], numbers: Tensor, *, split: bool) -> dict[str, Tensor]:
    """Columns of all sampled tokens, session by session; `numbers` are the models' of each."""
    keys, tags, masks, rewards = [], [], [], []
    for index, session in enumerate(played):
        rows = rows_of(session, split)
        for number, row in enumerate(rows):
            keys.append(Key(session.prompt, index, number))
            tags.append(Tags(reward=session.reward))
            mask = [flag for t in row for flag in (*[False] * t.given, *[True] * t.sampled)]
            masks.append(torch.tensor(mask))
            rewards.append(session.reward if number == len(rows) - 1 else 0.0)
    mask = Ragged.from_rows(masks)
    sampled = mask.values
    spread = torch.zeros(3, len(sampled))
    spread[:, sampled] = numbers[:, : int(sampled.sum())]
    columns: dict[str, Column] = {
        "response_mask": mask,
        "reward_tokens": at_last_sampled(torch.tensor(rewards), mask),
    }
    for name, values in zip(("old_logprobs", "ref_logprobs", "values"), spread, strict=True):
        columns[name] = Ragged.packed(values, mask.lengths)
    store = MemoryStore()
    batch = BatchRef("train", tuple(keys), tuple(tags))
    store.put(batch, columns)
    baselines = {session.prompt: 0.25 for session in played} if asked.algorithm.advantage == "remax" else {}
    plan = make_plan(asked)
    watch = Watch(asked.checks, print)
    role = AdvantageRole(asked.algorithm, asked.distill, asked.reward.weight, plan, store, watch)
    role.advantages(StepInfo(batch, baselines=baselines))
    got = store.get(batch, plan["advantages"].writes)
    return {name: column.values[sampled] for name, column in got.items() if isinstance(column, Ragged)}


@pytest.mark.parametrize(("advantage", "place"), KINDS)
@settings(max_examples=15)
@given(played=sessions, seed=st.integers(0, 2**16))
def test_a_session_cut_at_turns_into_trajectories_has_the_same_advantages(
    advantage: str, place: str, played: list[Played], seed: int
):
    """Groups of unequal size and of one, sessions of unequal numbers of trajectories."""
    played = sorted(played, key=lambda session: session.prompt)
    tokens = sum(turn.sampled for session in played for turn in session.turns)
    numbers = -torch.rand(3, tokens, generator=torch.Generator().manual_seed(seed))
    asked = recipe(advantage, place)
    whole, split = (advantages(asked, played, numbers, split=split) for split in (False, True))
    assert whole.keys() == split.keys()
    for name, values in whole.items():
        torch.testing.assert_close(split[name], values, rtol=1e-5, atol=1e-6)


def test_a_reward_counts_once_however_many_trajectories_a_session_left():
    """Two sessions with rewards 1 and 0: by rows, the first one's three would pull the mean to 3/4."""
    played = [
        Played(0, 1.0, (Turn(0, 1, False), Turn(1, 1, True), Turn(1, 1, True))),
        Played(0, 0.0, (Turn(0, 1, False),)),
    ]
    got = advantages(recipe("dr_grpo", "off"), played, torch.zeros(3, 4), split=True)
    assert got["advantages"].tolist() == [0.5, 0.5, 0.5, -0.5]


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
@settings(max_examples=25)
@given(
    offset=st.sampled_from([0.0, -3.0, 100.0, 1e4, -1e6]),
    scale=st.sampled_from([1e-6, 1e-3, 0.02, 1.0, 50.0, 1e6]),
    rewards=st.lists(st.tuples(st.integers(0, 2), st.floats(-1, 1, width=32)), min_size=1, max_size=12),
)
def test_the_check_of_advantages_is_silent_on_any_rewards(
    advantage: str, offset: float, scale: float, rewards: list[tuple[int, float]]
):
    turns = (Turn(1, 2, False), Turn(1, 1, True))
    played = [Played(prompt, offset + scale * number, turns) for prompt, number in sorted(rewards)]
    assert advantages(recipe(advantage, "off"), played, torch.zeros(3, 3 * len(played)), split=True)
