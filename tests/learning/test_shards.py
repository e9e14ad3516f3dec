"""Ranks that receive their shards from the first have, compute and write what ranks with whole models do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from practicum.learning.learner import Learner
from practicum.learning.logprobs import LogprobScorer
from practicum.learning.parallel import Parallel
from practicum.learning.update_batch import CriticBatch
from practicum.learning.value_learner import ValueLearner
from practicum.models.load_model import load_model
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.algorithm_sections import CriticSection as CriticRecipe
from practicum.recipe.schema.recipe import Lora, Model

from .ranks import TRAIN, on_rank, on_ranks, uneven
from .reference import random_batch, take, tiny
from .test_vision import seeing

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
LORA = {"lora": Lora(rank=4, alpha=4.0)}


@dataclass(frozen=True)
class Case:
    """A model in a folder and how it is loaded."""

    make: Callable[[], PreTrainedModel]
    dtype: Any = "float32"
    more: dict[str, Any] = field(default_factory=dict)
    files: str = "5GB"
    """Size of each file."""

    def spec(self, folder: Path) -> Model:
        return Model(path=str(folder), dtype=self.dtype, device="cpu", **self.more)


CASES = {
    "dense": Case(lambda: tiny("llama", torch.float32)),
    "tied": Case(lambda: tiny("qwen3", torch.float32)),
    "gpt2": Case(lambda: tiny("gpt2", torch.float32)),
    "experts": Case(lambda: tiny("qwen3_moe", torch.float32)),
    "pictures": Case(lambda: seeing(torch.float32)),
    "half": Case(lambda: tiny("qwen3", torch.bfloat16), "bfloat16"),
    "halved": Case(lambda: tiny("llama", torch.float32), "bfloat16", files="20KB"),
    "adapter": Case(lambda: tiny("qwen3_moe", torch.float32), more=LORA),
    "half_adapter": Case(lambda: tiny("llama", torch.bfloat16), "bfloat16", more=LORA),
}


@dataclass
class Found:
    """What a rank has: its shards and buffers after loading, then what an update made of them."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    base: str | None = None
    stop: Any = None

    def keep(self, name: str, model: torch.nn.Module) -> None:
        for key, p in model.named_parameters():
            local: Any = p.detach()
            self.tensors[f"{name}.{key}.{p.requires_grad}"] = local.to_local().clone()
        for key, buffer in model.named_buffers():
            self.tensors[f"{name}.{key}"] = buffer.clone()


def run(parallel: Parallel, folder: Path) -> dict[str, dict[str, Found]]:
    """Each case by either way."""
    found: dict[str, dict[str, Found]] = {}
    for name, case in CASES.items():
        spec = case.spec(folder.parent / name)
        model = load_model(spec, 3, rank=parallel.rank)
        assert parallel.rank == 0 or all(p.is_meta for p in model.parameters())
        found[name] = {
            "shards": learn(parallel, model, folder / name / "shards"),
            "whole": learn(parallel, load_model(spec, 3), folder / name / "whole"),
        }
    return found


def learn(parallel: Parallel, model: PreTrainedModel, folder: Path) -> Found:
    """A critic and a student, each with one update; the student is exported."""
    found = Found()
    critic = ValueLearner(model, TRAIN, CriticRecipe(lr=0.01), parallel=parallel)
    found.keep("critic", critic.model)
    learner = Learner(model, TRAIN, Algorithm(), parallel=parallel)
    found.keep("student", learner.model)
    found.base = learner.base
    found.stop = model.generation_config.eos_token_id  # pyright: ignore[reportOptionalMemberAccess]
    found.tensors["fingerprint"] = LogprobScorer(learner.trunk).fingerprint()
    batch = random_batch(1)
    split = uneven(len(batch.sessions))
    found.metrics += [learner.update(on_rank(batch, split, parallel)), critic_update(critic, parallel)]
    found.keep("learnt", learner.model)
    found.keep("valued", critic.model)
    learner.export(folder, make_tokenizer())
    return found


def critic_update(critic: ValueLearner, parallel: Parallel | None) -> dict[str, float]:
    batch = random_batch(1)
    mine = batch if parallel is None else take(batch, uneven(len(batch.sessions))[parallel.rank])
    assert mine.advantages is not None
    values = critic.values(mine.prompt_ids, mine.response_ids)
    tokens = int(batch.response_mask.values.sum())
    rows = mine.prompt_ids, mine.response_ids, mine.response_mask, values, mine.advantages
    return critic.update(CriticBatch(*rows, whole_tokens=None if parallel is None else tokens))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for name, case in CASES.items():
        case.make().save_pretrained(folder / name, max_shard_size=case.files)
    assert len([*(folder / "halved").glob("*.safetensors")]) > 3
    with safe_open(folder / "experts" / "model.safetensors", "pt") as file:
        assert any(".experts.5." in key for key in file.keys())  # noqa: SIM118
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, dict[str, Found]]]:
    (folder / "ranks").mkdir()
    return on_ranks(folder / "ranks", run)


@pytest.mark.parametrize("name", CASES)
def test_shards_that_are_read_alone_are_those_of_the_whole_model(name, ranks):
    for rank in ranks:
        shards, all_of_it = rank[name]["shards"], rank[name]["whole"]
        assert shards.tensors.keys() == all_of_it.tensors.keys()
        for key, tensor in all_of_it.tensors.items():
            assert shards.tensors[key].dtype == tensor.dtype
            assert torch.equal(shards.tensors[key], tensor), key
        assert shards.metrics == all_of_it.metrics
        assert shards.base == all_of_it.base
        assert (shards.base is None) == (name not in ("adapter", "half_adapter"))
        assert shards.stop == all_of_it.stop


@pytest.mark.parametrize("name", CASES)
def test_an_export_of_shards_has_the_files_of_one_of_a_whole_model(name, folder, ranks):
    one, other = (folder / "ranks" / name / kind for kind in ("shards", "whole"))
    files = sorted(file.relative_to(one) for file in one.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(other) for file in other.rglob("*") if file.is_file())
    for file in files:
        if file.suffix == ".safetensors":
            mine, theirs = load_file(one / file), load_file(other / file)
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    if name in ("dense", "tied", "gpt2", "experts", "pictures", "half"):
        assert saved(one).keys() == saved(folder / name).keys(), "named as in the files that were read"


def saved(folder: Path) -> dict[str, Tensor]:
    return {key: x for file in folder.glob("*.safetensors") for key, x in load_file(file).items()}


def test_a_critic_of_a_bfloat16_model_learns_on_two_ranks_what_it_does_on_one(folder, ranks):
    """Its head is in float32, which FSDP2 does not have in one group with bfloat16."""
    model = load_model(CASES["half"].spec(folder / "half"), 3)
    alone = ValueLearner(model, TRAIN, CriticRecipe(lr=0.01))
    metrics = critic_update(alone, None)
    for rank in ranks:
        assert rank["half"]["shards"].metrics[1] == pytest.approx(metrics, rel=1e-3)
    head = [rank["half"]["shards"].tensors["valued.head.weight.True"] for rank in ranks]
    assert head[0].dtype == torch.float32
    assert head[0].abs().max() > 0
    torch.testing.assert_close(torch.cat(head), alone.head.weight.detach(), rtol=0, atol=1e-6)
    base = [rank["half"]["shards"].tensors["valued.base.norm.weight.True"] for rank in ranks]
    norm = alone.trunk.model.get_parameter("norm.weight").detach()
    torch.testing.assert_close(torch.cat(base), norm, rtol=0, atol=0.02)
