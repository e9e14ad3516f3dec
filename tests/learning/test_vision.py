"""Vision models: rows with and without pictures equal the model's own forward; the tower learns too."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from practicum.cpu.norms import fuse_norms
from practicum.dataplane.ragged import Ragged
from practicum.engines.protocol import Counter, GenerateRequest, Generation
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import DataError
from practicum.learning.learner import Learner
from practicum.learning.packing import RowExtras, RowSpans
from practicum.learning.update_batch import CriticBatch, UpdateBatch
from practicum.learning.value_learner import ValueLearner
from practicum.models.load_model import ready
from practicum.models.processor import make_vision_tokenizer
from practicum.models.tiny_models import made_config
from practicum.models.vision import Images, sequence_positions
from practicum.recipe.schema.algorithm_sections import Algorithm
from practicum.recipe.schema.algorithm_sections import CriticSection as CriticRecipe
from practicum.recipe.schema.recipe import MakeModel, Train
from tests.engines.engines import engine_of, sampling

from .reference import random_batch, take, tiny, with_padding
from .updates import assert_same, learn

TRAIN = Train(lr=0.01, optimizer="tests.learning.optimizers:steady", max_grad_norm=None)
ALGORITHM = Algorithm(loss="ppo_clip")


@cache
def seeing(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A tiny vision model with weights large enough for attention to matter."""
    spec = MakeModel(family="qwen2_5_vl", hidden=32, layers=2, heads=2, context=64)
    config: Any = made_config(spec, make_vision_tokenizer())
    for part in (config, config.text_config, config.vision_config):
        part.initializer_range = 0.2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).to(dtype)
    fuse_norms(model)
    return ready(model, torch.device("cpu"))


CONFIG: Any = seeing().config
PICTURE = CONFIG.image_token_id


def pictures(seed: int, *sizes: tuple[int, int]) -> Images:
    """Pictures of these heights and widths in merged patches."""
    grid = torch.tensor([[1, 2 * height, 2 * width] for height, width in sizes])
    generator = torch.Generator().manual_seed(seed)
    return Images(torch.randn(int(grid.prod(1).sum()), 48, generator=generator), grid)


ONE, OTHER, TWO = pictures(0, (2, 2)), pictures(1, (2, 2)), pictures(2, (1, 3), (2, 1))
ROWS: list[tuple[list[int], list[int], Images | None]] = [
    ([5, *[PICTURE] * 4, 6, 7], [8, 9, 10], ONE),
    ([5, *[PICTURE] * 4, 6, 7], [11, 12], OTHER),
    ([5, 6, 7], [8, 9, 10, 3], None),
    ([5, *[PICTURE] * 4, 6, 7], [13], ONE),
    ([*[PICTURE] * 3, 9, *[PICTURE] * 2], [7, PICTURE, 8, 4], TWO),
    ([5, 6, 7], [4, 4], None),
    ([5, *[PICTURE] * 4, 6, PICTURE, 7], [8, 9], ONE),  # a turn that sampled an image token lies behind
    ([5, *[PICTURE] * 4, 6, 7, 8], [8, 9], OTHER),
]


def vision_batch(rows: Sequence[tuple[list[int], list[int], Images | None]] = ROWS) -> UpdateBatch:
    prompts, responses, images = zip(*rows, strict=True)
    generator = torch.Generator().manual_seed(0)
    lengths = [len(r) for r in responses]
    numbers = torch.randn(2, sum(lengths), generator=generator)
    positions = [
        sequence_positions(CONFIG, p + r, i) for p, r, i in zip(prompts, responses, images, strict=True)
    ]
    return UpdateBatch(
        prompt_ids=Ragged.from_rows([torch.tensor(p) for p in prompts]),
        response_ids=Ragged.from_rows([torch.tensor(r) for r in responses]),
        response_mask=Ragged.from_rows([torch.ones(n, dtype=torch.bool) for n in lengths]),
        sessions=list(range(len(rows))),
        advantages=Ragged.packed(numbers[0], lengths),
        old_logprobs=Ragged.packed(-numbers[1].abs(), lengths),
        extras=RowExtras(position_ids=Ragged.from_rows(positions), images=list(images)),
    )


def own_hidden(model: Any, row: tuple[list[int], list[int], Images | None]) -> Tensor:
    """The states that predict a row's response, by the model's own forward."""
    prompt, response, images = row
    base, ids = model.base_model, torch.tensor([prompt + response])
    inputs: dict[str, Any] = {"input_ids": ids}
    if images is not None:
        looks_so = ids == PICTURE
        is_so = looks_so & (looks_so.cumsum(1) <= images.grid.prod(1).sum() // 4)
        inputs |= {**images.as_inputs(), "mm_token_type_ids": is_so.int()}
        if not torch.equal(looks_so, is_so):
            # A sampled image token stands for no picture, which the whole model would not understand.
            features = torch.cat(base.get_image_features(images.pixels, images.grid).pooler_output)
            embedded = base.get_input_embeddings()(ids).masked_scatter(is_so[..., None], features)
            positions, _ = base.get_rope_index(ids, is_so.int(), images.grid)
            inputs = {"inputs_embeds": embedded, "position_ids": positions}
    hidden = base(**inputs, use_cache=False).last_hidden_state[0]
    return hidden[len(prompt) - 1 : -1]


@torch.no_grad()
def slow_logprobs(like: PreTrainedModel) -> Tensor:
    model: Any = copy.deepcopy(like)
    model.set_attn_implementation("sdpa")
    found = []
    for row in ROWS:
        logits = model.get_output_embeddings()(own_hidden(model, row))
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(row[1])[:, None])[:, 0])
    return torch.cat(found).float()


@pytest.mark.parametrize("budget", [1, 20, 2048])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_logprobs_equal_the_model_s_own_with_none_one_or_two_pictures(budget, dtype, tolerance):
    learner, batch = Learner(copy.deepcopy(seeing(dtype)), TRAIN, ALGORITHM), vision_batch()
    learner.trunk.token_budget = budget
    found = learner.scorer.logprobs(
        batch.prompt_ids, batch.response_ids, temperature=1.0, extras=batch.extras
    )
    theirs = slow_logprobs(seeing(dtype))
    torch.testing.assert_close(found.values, theirs, rtol=0, atol=tolerance)


def test_logprobs_of_what_the_engine_sampled_are_the_engine_s():
    model = seeing(torch.float32)
    shown = [(prompt, images) for prompt, _, images in ROWS]

    async def run(engine: TorchEngine) -> list[Generation]:
        jobs = (
            engine.generate(GenerateRequest(prompt, sampling(12), Counter(0, i), images=images))
            for i, (prompt, images) in enumerate(shown)
        )
        return await asyncio.gather(*jobs)

    with engine_of(copy.deepcopy(model), context=64) as engine:
        answers = asyncio.run(run(engine))
    rows = [
        (prompt, answer.tokens.tolist(), images)
        for (prompt, images), answer in zip(shown, answers, strict=True)
    ]
    batch = vision_batch(rows)
    learner = Learner(copy.deepcopy(model), TRAIN, ALGORITHM)
    found = learner.scorer.logprobs(
        batch.prompt_ids, batch.response_ids, temperature=1.0, extras=batch.extras
    )
    theirs = torch.cat([answer.plain_logprobs for answer in answers])
    torch.testing.assert_close(found.values, theirs, rtol=0, atol=1e-4)


def test_rows_share_a_prompt_only_if_its_pictures_are_equal():
    batch = vision_batch()
    rows = RowSpans(batch.prompt_ids, batch.response_ids, batch.extras)
    packed, tree = rows.pack([0, 1, 2, 3]), rows.tokens.tree([0, 1, 2, 3])
    shown = {images.digest: place for images, place in zip(packed.images, packed.image_prompts, strict=True)}
    assert shown.keys() == {ONE.digest, OTHER.digest}
    assert batch.extras is not None
    assert batch.extras.position_ids is not None
    for i, path_N in tree.paths.items():
        path = torch.from_numpy(path_N)
        prompt, response, images = ROWS[i]
        assert packed.ids_N[path].tolist() == [*prompt, *response][:-1]
        assert torch.equal(packed.positions_N[path], batch.extras.position_ids[i][:-1])
        if images is not None:
            assert shown[images.digest].tolist() == path[: len(prompt)].tolist()


def test_gradients_reach_the_vision_tower_and_do_not_depend_on_the_cut():
    batch = vision_batch()
    whole, _ = learn(seeing(), batch, TRAIN, ALGORITHM)
    tower = {name: grad for name, grad in whole.grads.items() if ".visual." in name}
    assert tower
    assert all(grad.abs().max() > 0 for grad in tower.values())
    alone, _ = learn(seeing(), batch, TRAIN, ALGORITHM, budget=1)
    assert_same(alone, whole, 1e-9)
    recomputing = TRAIN.model_copy(update={"gradient_checkpointing": True})
    again, _ = learn(seeing(), batch, recomputing, ALGORITHM)
    assert_same(again, whole, 1e-9)


def test_an_update_without_pictures_steps_the_tower_as_with_zero_gradients():
    mine, _ = learn(seeing(), vision_batch([ROWS[2], ROWS[5]]), TRAIN, ALGORITHM)
    tower = {name: grad for name, grad in mine.grads.items() if ".visual." in name}
    assert tower
    assert not any(grad.any() for grad in tower.values())


def test_padding_rows_beside_pictures_change_not_one_bit():
    batch, model = vision_batch(), seeing(torch.float32)
    without, metrics = learn(model, batch, TRAIN, ALGORITHM, budget=30)
    mine, same = learn(model, with_padding(batch, [0, 3, 3, 9]), TRAIN, ALGORITHM, budget=30)
    assert same == metrics
    for name, weight in without.weights.items():
        assert torch.equal(mine.weights[name], weight), name


def test_the_critic_sees_pictures():
    critic, batch = ValueLearner(seeing(), TRAIN, CriticRecipe(lr=0.01)), vision_batch()
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.5, 0.5, 32))
        model = copy.deepcopy(seeing())
        model.set_attn_implementation("sdpa")
        theirs = torch.cat([critic.head(own_hidden(model, row))[:, 0] for row in ROWS])
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    ids = batch.prompt_ids, batch.response_ids
    mine = critic.values(*ids, extras=batch.extras).values
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    before = copy.deepcopy(critic.trunk.model.state_dict())
    critic.update(CriticBatch(*ids, batch.response_mask, batch.old_logprobs, batch.advantages, batch.extras))
    after = critic.trunk.model.state_dict()
    changed = [name for name, weight in after.items() if not torch.equal(weight, before[name])]
    assert any(name.startswith("visual.") for name in changed)


def test_pictures_that_can_t_be_read_are_named():
    batch = take(vision_batch(), [0, 2])
    assert batch.extras is not None
    blind = replace(batch, extras=replace(batch.extras, position_ids=None))
    with pytest.raises(DataError, match="position_ids"):
        learn(seeing(), blind, TRAIN, ALGORITHM)
    fewer = replace(batch, extras=replace(batch.extras, images=[ONE]))
    with pytest.raises(DataError, match="2 rows came with images of 1"):
        learn(seeing(), fewer, TRAIN, ALGORITHM)
    text = random_batch(1)
    rows = [torch.zeros(p + r, 3, dtype=torch.int64) for p, r in zip(*lengths_of(text), strict=True)]
    images = [ONE] * len(rows)
    shown = replace(text, extras=RowExtras(position_ids=Ragged.from_rows(rows), images=images))
    with pytest.raises(DataError, match="images, which Qwen3ForCausalLM does not take"):
        learn(tiny(), shown, TRAIN, ALGORITHM)


def lengths_of(batch: UpdateBatch) -> tuple[list[int], list[int]]:
    return batch.prompt_ids.lengths, batch.response_ids.lengths
