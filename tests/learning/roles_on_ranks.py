"""The learner's roles on one rank and on two: stages from a store, mini-batches, padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from practicum.checks.watch import Watch
from practicum.dataplane.batch import BatchRef
from practicum.dataplane.columns import padding_batch
from practicum.dataplane.keys import Key, Tags
from practicum.dataplane.memory_store import MemoryStore
from practicum.dataplane.ragged import Column, Ragged
from practicum.learning.learner import Learner
from practicum.learning.logprobs import LogprobScorer
from practicum.learning.packed_model import PackedModel
from practicum.learning.parallel import Parallel
from practicum.learning.value_learner import ValueLearner
from practicum.recipe.algorithm_traits import loss_traits
from practicum.recipe.schema.recipe import Recipe
from practicum.recipe.schema.teacher_sections import Route
from practicum.roles.advantages import AdvantageRole
from practicum.roles.critic import CriticRole
from practicum.roles.padding import BatchCutter
from practicum.roles.run_stage import StepInfo
from practicum.roles.stage_table import make_plan, ratio_source
from practicum.roles.student import StudentRole

from .ranks import Found, case
from .reference import VOCAB, tiny

FIELDS = (
    "prompt_ids",
    "response_ids",
    "response_mask",
    "plain_logprobs",
    "rollout_logprobs",
    "reward_tokens",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "advantages",
    "returns",
)
WRITTEN = ("old_logprobs", "ref_logprobs", "values")
"""By the stages; the others are there from the start."""


class WatchedStore(MemoryStore):
    """Remembers which rows were read, and what stages wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[Key] = set()
        self.written: dict[str, dict[Key, Tensor]] = {}

    def get(self, batch: BatchRef, fields: Sequence[str]) -> dict[str, Column]:
        self.read |= set(batch.keys)
        return super().get(batch, fields)

    def put(self, batch: BatchRef, columns: Mapping[str, Column], *, keep_tags: bool = False) -> None:
        super().put(batch, columns, keep_tags=keep_tags)
        for name, column in columns.items() if keep_tags else ():
            assert isinstance(column, Ragged)
            self.written.setdefault(name, {}).update(zip(batch.keys, column.rows, strict=True))


def make_rows(rows: int, padding: int) -> tuple[WatchedStore, BatchRef]:
    """Sessions of one to three rows, three sessions to a prompt, in a store with all columns."""
    g = torch.Generator().manual_seed(rows)
    keys = [Key(i // 6, i % 6 // 2, i % 2) for i in range(rows)]
    prompts = [torch.randint(0, VOCAB, (1 + i % 5,), generator=g) for i in range(rows)]
    responses = [torch.randint(0, VOCAB, (1 + 3 * i % 8,), generator=g) for i in range(rows)]
    masks = [torch.rand(len(r), generator=g) < 0.8 for r in responses]

    def numbers() -> list[Tensor]:
        return [-torch.rand(len(r), generator=g) for r in responses]

    tags = [
        Tags(prompt_tokens=len(p), response_tokens=len(r), sampled_tokens=int(m.sum()), domain="d")
        for p, r, m in zip(prompts, responses, masks, strict=True)
    ]
    columns: dict[str, Column] = {name: Ragged.from_rows(numbers()) for name in FIELDS if name not in WRITTEN}
    columns |= {
        "prompt_ids": Ragged.from_rows(prompts),
        "response_ids": Ragged.from_rows(responses),
        "response_mask": Ragged.from_rows(masks),
        "rollout_logprobs": Ragged.from_rows([4 * row - 2 for row in numbers()]),
    }
    store, batch = WatchedStore(), BatchRef("train", tuple(keys), tuple(tags))
    store.put(batch, columns)
    if padding:
        filler, blank = padding_batch("train", padding, FIELDS, end_id=0, widths={})
        store.put(filler, blank)
        batch = BatchRef.concat([batch, filler])
    return store, batch


def make_recipe(train: dict[str, Any], loss: str, algorithm: dict[str, Any]) -> Recipe:
    kl = {"place": "loss", "coefficient": 0.1}
    return Recipe.model_validate(
        {
            "name": "t",
            "model": {"random_init": {}},
            "tasks": {"sort": {"kind": "sort"}},
            "algorithm": {"advantage": "gae", "loss": loss, "kl": kl, **algorithm},
            "critic": {},
            "train": {"lr": 0.01, "optimizer": "tests.learning.optimizers:steady", **train},
            "checks": {"level": "off"},
        }
    )


def run_roles(
    parallel: Parallel | None,
    rows: int,
    train: dict[str, Any],
    loss: str = "ppo_clip",
    steps: int = 1,
    **algorithm: Any,
) -> Found:
    """All learner stages of some steps, on a batch that is padded if there are ranks to share it. Advantages
    are made up, except where they are weighed."""
    recipe, found = make_recipe(train, loss, algorithm), Found()
    watch = Watch(recipe.checks, print)
    model = tiny()
    critic = (
        None if recipe.critic is None else ValueLearner(model, recipe.train, recipe.critic, parallel=parallel)
    )
    assert critic is not None
    reference = LogprobScorer(PackedModel(tiny(seed=1), recipe.train, parallel))
    learner = Learner(model, recipe.train, recipe.algorithm, parallel=parallel)
    for step in range(1, steps + 1):
        rank, ranks = (0, 1) if parallel is None else (parallel.rank, parallel.world)
        whole = loss_traits(loss).whole_sessions
        cutter = BatchCutter(recipe.train, seed=recipe.seed, whole_sessions=whole, rank=rank, ranks=ranks)
        lacking = cutter.padding_rows(make_rows(rows, 0)[1])
        store, batch = make_rows(rows, lacking)
        plan, info = make_plan(recipe), StepInfo(batch, step)
        student = StudentRole(
            plan,
            store,
            learner,
            reference,
            watch,
            cutter,
            temperature=recipe.rollout.temperature,
            old=ratio_source(recipe),
            teachers={},
            route=Route(measure_every=0),
        )
        critic_role = CriticRole(plan, store, critic, cutter)
        if "old_logprobs" in plan:
            student.old_logprobs(info)
        student.ref_logprobs(info)
        critic_role.values(info)
        found.columns[f"read {step}"] = {key: torch.tensor(0) for key in store.read if key.prompt >= 0}
        for name, written in store.written.items():
            found.columns[f"{name} {step}"] = dict(written)
        _exchange(parallel, store, batch)
        if algorithm:
            weighed = recipe.algorithm, recipe.distill, recipe.reward.weight
            found.metrics.append(AdvantageRole(*weighed, plan, store, watch).advantages(info) or {})
        learnt, valued = student.update(info), critic_role.update(info)
        assert learnt is not None
        assert valued is not None
        # Ranks share what lies on one of them.
        found.metrics += [{k: v for k, v in learnt.metrics.items() if k != "shared/learn"}, valued]
    found.keep(learner.model, learner.stepper)
    found.keep(critic.model, critic.stepper)
    return found


def _exchange(parallel: Parallel | None, store: WatchedStore, batch: BatchRef) -> None:
    """Put into this rank's store what the others wrote, as one store for all would have it."""
    for theirs in [] if parallel is None else parallel.gather(store.written):
        for name, rows in theirs.items():
            written = batch.take([i for i, key in enumerate(batch.keys) if key in rows])
            store.put(written, {name: Ragged.from_rows([rows[key] for key in written.keys])})


@case
def roles_with_minibatches(parallel: Parallel | None, folder: Path) -> Found:
    return run_roles(parallel, 11, {"minibatches": 2}, steps=2)


@case
def roles_with_gspo(parallel: Parallel | None, folder: Path) -> Found:
    return run_roles(parallel, 7, {}, loss="gspo")


@case
def roles_with_weights(parallel: Parallel | None, folder: Path) -> Found:
    """Ratios of sessions whose rows lie on both ranks, in two optimizer steps."""
    found = run_roles(parallel, 11, {"minibatches": 2}, mismatch="sequence", mismatch_cap=1.2)
    assert all(0 < found.metrics[0][f"mismatch_{name}"] < 1 for name in ("truncated", "weight"))
    return found


@case
def roles_with_one_row(parallel: Parallel | None, folder: Path) -> Found:
    """The other rank has padding alone."""
    return run_roles(parallel, 1, {})
