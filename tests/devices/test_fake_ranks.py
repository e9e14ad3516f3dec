"""Learners of 2, 4 and 8 ranks in one process: torch's fake process group, whose collectives move nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from practicum.learning.learner import Learner
from practicum.learning.packed_model import PackedModel
from practicum.learning.parallel import Parallel
from practicum.recipe.schema.algorithm_sections import Algorithm

from ..learning.ranks import TRAIN
from ..learning.reference import tiny


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[Parallel]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield Parallel(rank, world)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_shards_of_all_ranks_are_the_model(world: int, monkeypatch: pytest.MonkeyPatch):
    # A pretended all-gather leaves memory as it was: nothing can be computed with the model.
    monkeypatch.setattr(PackedModel, "_probe_gap", lambda self: 0.0)
    whole = dict(tiny(seed=7).named_parameters())
    shards: dict[str, list[torch.Tensor]] = {name: [] for name in whole}
    for rank in range(world):
        with fake_rank(rank, world) as parallel:
            model = tiny(seed=7)
            Learner(model, TRAIN, Algorithm(), parallel=parallel)
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                shards[name].append(parameter.to_local().detach().clone())
    for name, parts in shards.items():
        assert torch.equal(torch.cat(parts), whole[name]), name
