"""Vision models: where pictures are, which positions tokens have, what the packed forward makes of them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from practicum.compat.transformers import IMPLEMENTATION
from practicum.errors import DataError, EngineError
from practicum.models.attention import head_logits, packed_forward
from practicum.models.load_model import context_length, load_model, model_facts
from practicum.models.packed_attention import PackedLayout
from practicum.models.vision import Images, is_vision, picture_tokens, sequence_positions
from practicum.recipe.schema.recipe import Model
from tests.engines.engines import picture_prompt, pictures, plain_forward, plain_inputs, tiny

Sizes = list[tuple[int, int]]
sizes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=3)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("qwen2_5_vl")


def shown(model: PreTrainedModel, sizes: Sizes, seed: int = 0) -> tuple[list[int], Images | None]:
    """A prompt and its pictures."""
    return picture_prompt(model, *sizes, seed=seed), pictures(model, *sizes, seed=seed) if sizes else None


def packed_logits(model: PreTrainedModel, rows: list[tuple[list[int], Images | None]]) -> list[Tensor]:
    """Logits of each row by one packed forward."""
    ids_N = torch.tensor([i for ids, _ in rows for i in ids])
    positions_N = torch.cat([sequence_positions(model.config, *row) for row in rows])
    lengths = [len(ids) for ids, _ in rows]
    layout = PackedLayout.of_sequences(lengths).to(model.device)
    images = [images for _, images in rows if images is not None]
    return [*head_logits(model, packed_forward(model, ids_N, positions_N, layout, images)).split(lengths)]


@given(sizes=sizes, response=st.integers(0, 4))
def test_positions_are_those_of_the_models_own_rope_index(
    model: PreTrainedModel, sizes: Sizes, response: int
):
    prompt, images = shown(model, sizes)
    ids = prompt + [7] * response
    positions_ND = sequence_positions(model.config, ids, images)
    if images is None:
        assert positions_ND.tolist() == [[i] * 3 for i in range(len(ids))]
        return
    inputs = plain_inputs(model, ids, images)
    expected, _ = model.base_model.get_rope_index(  # pyright: ignore
        inputs["input_ids"], inputs["mm_token_type_ids"], images.grid
    )
    assert torch.equal(positions_ND, expected[:, 0].t())


def test_text_behind_pictures_goes_on_from_the_largest_position(model: PreTrainedModel):
    token = model.config.image_token_id
    positions_ND = sequence_positions(model.config, [5, *[token] * 6, 6, 7], pictures(model, (2, 3)))
    assert positions_ND.t().tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]


def test_image_tokens_behind_the_pictures_are_plain_tokens(model: PreTrainedModel):
    token = model.config.image_token_id
    ids = [5, *[token] * 4, 6, token, token, 7]
    images = pictures(model, (2, 2))
    assert picture_tokens(model.config, ids, images).tolist() == [i in (1, 2, 3, 4) for i in range(9)]
    assert sequence_positions(model.config, ids, images)[5:].tolist() == [[n] * 3 for n in (3, 4, 5, 6)]
    assert not picture_tokens(model.config, ids, None).any()


@settings(max_examples=10)
@given(rows=st.lists(sizes, min_size=1, max_size=4))
def test_packed_rows_with_and_without_pictures_equal_the_plain_forward(
    model: PreTrainedModel, rows: list[Sizes]
):
    asked = [shown(model, sizes, seed) for seed, sizes in enumerate(rows)]
    with torch.no_grad():
        for got, row in zip(packed_logits(model, asked), asked, strict=True):
            assert torch.allclose(got, plain_forward(model, *row), atol=1e-3, rtol=1e-4)


def test_gradients_reach_the_vision_tower_as_in_the_plain_forward(model: PreTrainedModel):
    row = shown(model, [(2, 2), (1, 3)])
    gradients = []
    for packed in (True, False):
        model.zero_grad()
        logits = (
            packed_logits(model, [row])[0] if packed else model(**plain_inputs(model, *row)).logits.squeeze(0)
        )
        logits[-1].square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    assert any("visual" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        assert torch.allclose(
            gradient, gradients[1][name], rtol=1e-3, atol=1e-3 * float(gradient.abs().max())
        )


def test_pictures_that_do_not_fit_their_tokens_are_errors(model: PreTrainedModel):
    ids, _ = shown(model, [(2, 2)])
    with pytest.raises(EngineError, match=r"4 image tokens .* images of \[6\] tokens"):
        sequence_positions(model.config, ids, pictures(model, (2, 3)))
    with pytest.raises(EngineError, match="each image needs its own run"):
        sequence_positions(model.config, [5, 6], pictures(model, (1, 1)))
    narrow = Images(torch.zeros(16, 12), torch.tensor([[1, 4, 4]]))
    with pytest.raises(EngineError, match="use the image processor of this model"):
        sequence_positions(model.config, ids, narrow)


def test_a_packed_forward_with_pictures_at_the_wrong_tokens_is_an_error(model: PreTrainedModel):
    token, images = model.config.image_token_id, pictures(model, (2, 2))
    plain, row = [5, token, 6], ([5, *[token] * 4, 6], images)
    positions_N = torch.cat(
        [sequence_positions(model.config, plain, None), sequence_positions(model.config, *row)]
    )
    ids_N = torch.tensor([*plain, *row[0]])
    layout = PackedLayout.of_sequences([3, 6])
    with pytest.raises(EngineError, match="do not fit 1 images"):
        packed_forward(model, ids_N, positions_N, layout, [images])
    with pytest.raises(EngineError, match="do not fit 2 images"):
        packed_forward(model, ids_N, positions_N, layout, [images, images])
    picture_N = torch.cat([torch.zeros(3, dtype=torch.bool), picture_tokens(model.config, *row)])
    with torch.no_grad():
        got = head_logits(model, packed_forward(model, ids_N, positions_N, layout, [images], picture_N))
    assert torch.allclose(got[3:], plain_forward(model, *row), atol=1e-3, rtol=1e-4)


def test_the_vision_tower_keeps_its_own_attention(model: PreTrainedModel):
    assert model.config.text_config._attn_implementation == IMPLEMENTATION
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_a_vision_model_is_loaded_from_its_folder(model: PreTrainedModel, tmp_path: Path):
    model.save_pretrained(tmp_path)
    spec = Model(path=str(tmp_path))
    loaded = load_model(spec, 0)
    assert is_vision(loaded.config)
    assert not is_vision(tiny().config)
    assert context_length(loaded) == context_length(model) == 128
    assert model_facts(spec, 0) == (128, model.config.get_text_config().vocab_size)
    row = shown(model, [(2, 1)])
    assert torch.equal(plain_forward(loaded, *row), plain_forward(model, *row))


def test_pictures_are_reported_apart_by_their_digests(model: PreTrainedModel):
    one, same, other = pictures(model, (2, 2)), pictures(model, (2, 2)), pictures(model, (2, 2), seed=1)
    assert one.digest == same.digest != other.digest
    turned = Images(pictures(model, (1, 4)).pixels, torch.tensor([[1, 8, 2]]))
    assert turned.digest != pictures(model, (1, 4)).digest
    assert pickle.loads(pickle.dumps(one)).digest == one.digest


def test_pictures_come_back_from_a_rows_inputs(model: PreTrainedModel):
    images = pictures(model, (2, 2), (1, 3))
    back = Images.from_inputs(images.as_inputs())
    assert back is not None
    assert back.digest == images.digest
    assert Images.from_inputs({}) is None
    with pytest.raises(DataError, match="28 patches"):
        Images(images.pixels[1:], images.grid)
