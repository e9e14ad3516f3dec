"""Models whose layers carry a state, in vLLM: those that `VllmKind.runs_recurrent` takes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import practicum as pr
from practicum.engines.protocol import Counter, GenerateRequest, Memory, ScoreOptions, ScoreRequest, Scores
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.engines.vllm.make_vllm import VllmKind
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.learning.logprobs import LogprobScorer
from practicum.learning.packed_model import PackedModel
from practicum.models.load_model import ready
from practicum.models.lora import merged_weights
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.recipe import Train
from practicum.recipe.schema.rollout_sections import Rollout
from tests.engines.engines import prompts, sampling
from tests.models.coverage import RECIPE
from tests.models.families import tiny_family

TOLERANCE = 1e-4
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}
MADE: dict[str, dict[str, Any]] = {
    "granitemoehybrid": HEADS | MAMBA,
    "granitemoehybrid without states": HEADS
    | MAMBA
    | {"layer_types": ["attention"] * 4, "num_local_experts": 0},
    "falcon_h1": HEADS | MAMBA | {"mamba_d_ssm": 128},
    "nemotron_h": HEADS
    | {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
    },
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 1},
}
"""Sizes that vLLM takes."""


def save(name: str, folder: Path) -> PreTrainedModel:
    tokenizer = make_tokenizer()
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = tiny_family(name.split()[0], prepared=False, **MADE[name] | ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ready(model, torch.device("cpu"))


Pair = tuple[VllmEngine, PreTrainedModel]


@pytest.fixture(scope="module", params=MADE)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save(request.param, folder)
    assert VllmKind().runs_recurrent(model.config)
    rollout = Rollout(engine="vllm", max_num_seqs=4, context=96)
    engine = VllmKind().for_rollout(rollout, str(folder), model, lambda: (merged_weights(model), 0))
    assert isinstance(engine, VllmEngine)
    yield engine, model
    engine.close()


def gap(engine: VllmEngine, model: PreTrainedModel) -> float:
    """Return by how much the engine's samples and scores of them differ from the torch engine's scores."""
    asked = prompts(9, seed=1, longest=70)
    other = TorchEngine(model, slots=4, context=96)

    async def work() -> list[tuple[torch.Tensor, list[Scores]]]:
        requests = [GenerateRequest(ids, sampling(12), Counter(0, n)) for n, ids in enumerate(asked)]
        found = await asyncio.gather(*(engine.generate(request) for request in requests))
        rows = [
            ScoreRequest([*ids, *one.tokens.tolist()], len(ids))
            for ids, one in zip(asked, found, strict=True)
        ]
        how = ScoreOptions(top_k=1)
        scores = [await asyncio.gather(*(each.score(row, how) for row in rows)) for each in (engine, other)]
        return [(one.plain_logprobs, [*both]) for one, *both in zip(found, *scores, strict=True)]

    gaps = []
    try:
        for sampled, (mine, theirs) in asyncio.run(work()):
            gaps += [sampled - theirs.logprobs, mine.logprobs - theirs.logprobs]
            assert mine.topk_logprobs is not None
            assert theirs.topk_logprobs is not None
            gaps.append(mine.topk_logprobs - theirs.topk_logprobs)
    finally:
        other.close()
    fingerprint = engine.fingerprint()
    gaps.append(fingerprint - LogprobScorer(PackedModel(model, Train())).fingerprint(len(fingerprint) + 1))
    return max(each.abs().max().item() for each in gaps)


def change(model: PreTrainedModel, seed: int) -> None:
    """Change all weights and saved buffers."""
    g = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        tensor.add_(0.05 * torch.randn(tensor.shape, generator=g))


def test_samples_and_scores_are_the_torch_engines_after_syncs_sleep_and_cancelled_requests(pair: Pair):
    engine, model = pair
    assert gap(engine, model) < TOLERANCE
    before = engine.fingerprint()
    for version in (1, 2):
        change(model, version)
        engine.load_weights(merged_weights(model), version)
        assert gap(engine, model) < TOLERANCE
        assert engine.version == version
    assert (engine.fingerprint() - before).abs().max() > 0.1

    async def cancelled() -> None:
        long = [GenerateRequest([5, 6], sampling(90), Counter(0, n)) for n in range(6)]
        asked = [asyncio.ensure_future(engine.generate(request)) for request in long]
        await engine.score(ScoreRequest([5, 6], 1))  # by now, the others are under way
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(cancelled())
    assert gap(engine, model) < TOLERANCE
    freed = engine.sleep()
    assert engine.memory() == Memory(0, 0)
    engine.wake()
    assert engine.memory() == freed
    assert gap(engine, model) < TOLERANCE


def test_grpo_and_distillation_with_a_hybrid_on_both_sides(tmp_path: Path):
    """Two steps with the student's samples, a teacher's scores and a sync of weights by vLLM."""
    save("granitemoehybrid", tmp_path / "model")
    path, gaps = str(tmp_path / "model"), []
    recipe = RECIPE | {
        "name": "hybrid",
        "model": {"path": path},
        "rollout": RECIPE["rollout"] | {"engine": "vllm"},
        "teachers": {"t": {"model": path, "engine": "vllm"}},
        "distill": {"top_k": 4},
        "train": RECIPE["train"] | {"steps": 2},
    }
    pr.train(
        recipe, out=tmp_path / "run", quiet=True, on_step=lambda step: gaps.append(step.get("train/gap_max"))
    )
    assert gaps.pop(0) is None  # before the first step
    assert len(gaps) == 2
    assert max(gaps) < TOLERANCE
