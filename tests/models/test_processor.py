"""Pictures and their places among the tokens are what transformers' own processor makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLProcessor, Qwen3Config

from practicum.errors import MissingExtraError, RecipeError
from practicum.models.processor import (
    Processor,
    encode_images,
    load_processor,
    make_processor,
    make_vision_tokenizer,
    read_processor,
)
from practicum.models.tokenizer import make_tokenizer
from practicum.recipe.schema.recipe import MakeModel, Model
from practicum.tasks.prompts import Prompt, encode_prompt


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


@pytest.fixture(scope="module")
def processor() -> Processor:
    return make_processor(make_vision_tokenizer())


def prompt(content: Any) -> Prompt:
    return Prompt(3, "t", "t", content, "x", {}, 0, 3)


def image(path: str) -> dict[str, str]:
    return {"type": "image", "image": path}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize("sizes", [[(16, 16)], [(24, 16), (40, 8)], [(21, 13), (16, 16), (300, 90)]])
def test_a_prompt_equals_what_the_real_processor_makes_of_its_messages(processor, tmp_path, sizes):
    pictures = [noise(*size, seed=n) for n, size in enumerate(sizes)]
    paths = []
    for n, picture in enumerate(pictures):
        paths.append(str(tmp_path / f"{n}.png"))
        picture.save(paths[-1])
    parts = [part for path in paths for part in (image(path), text("and "))]
    messages = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": [*parts, text("what?")]},
        {"role": "assistant", "content": "dots"},
        {"role": "user", "content": "how many?"},
    ]
    encoded = encode_prompt(prompt(messages), processor.tokenizer, False, None, processor=processor)

    # Only the class's constructor is ours; all that turns text and pictures into inputs is transformers'.
    assert Processor.__call__ is Qwen2_5_VLProcessor.__call__
    assert Processor.replace_image_token is Qwen2_5_VLProcessor.replace_image_token
    rendered = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    real = processor(text=[rendered], images=pictures, return_tensors="pt")
    assert encoded.ids == real["input_ids"][0].tolist()
    assert encoded.images is not None
    assert torch.equal(encoded.images.pixels, real["pixel_values"])
    assert torch.equal(encoded.images.grid, real["image_grid_thw"])
    assert encoded.messages == messages


def test_the_vision_tokenizer_writes_text_as_the_plain_one():
    plain, vision = make_tokenizer(), make_vision_tokenizer()
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert vision.encode("sort:31=") == plain.encode("sort:31=")
    for ending in (True, False):
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": ending}
        assert vision.apply_chat_template(chat, **options) == plain.apply_chat_template(chat, **options)


def test_a_saved_processor_reads_the_same(processor, tmp_path):
    processor.tokenizer.save_pretrained(tmp_path)
    processor.image_processor.save_pretrained(tmp_path)
    again = read_processor(str(tmp_path), AutoTokenizer.from_pretrained(tmp_path))
    pictures = [noise(21, 13), noise(40, 90)]
    images, counts = encode_images(again, pictures)
    expected, expected_counts = encode_images(processor, pictures)
    assert counts == expected_counts
    assert torch.equal(images.pixels, expected.pixels)
    assert again.image_token_id == processor.image_token_id


def test_the_recipe_says_whether_there_is_a_processor(processor, tmp_path):
    made = Model(random_init=MakeModel(family="qwen2_5_vl"))
    assert load_processor(made, processor.tokenizer) is not None
    assert load_processor(Model(random_init=MakeModel()), make_tokenizer()) is None
    Qwen3Config().save_pretrained(tmp_path / "text")
    assert load_processor(Model(path=str(tmp_path / "text")), make_tokenizer()) is None
    Qwen2_5_VLConfig().save_pretrained(tmp_path / "vision")
    processor.image_processor.save_pretrained(tmp_path / "vision")
    assert load_processor(Model(path=str(tmp_path / "vision")), processor.tokenizer) is not None


def test_a_vision_model_without_its_processor_names_what_lacks(processor, tmp_path):
    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"model\.path: .*preprocessor_config\.json"):
        load_processor(Model(path=str(tmp_path)), processor.tokenizer)


def test_an_image_processor_without_a_grid_is_refused(processor, tmp_path):
    from transformers import CLIPImageProcessor

    CLIPImageProcessor().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"with CLIPImageProcessor\w*, expected one that cuts .* grid"):
        read_processor(str(tmp_path), processor.tokenizer, key="teachers.eye.path")


def test_a_tokenizer_without_image_tokens_is_refused():
    spec = Model(random_init=MakeModel(family="qwen2_5_vl"), tokenizer="some/where")
    with pytest.raises(RecipeError, match=r"model\.tokenizer: .*some/where without the token <.vision"):
        load_processor(spec, make_tokenizer())


def test_without_pillow_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("practicum.models.processor.is_vision_available", lambda: False)
    with pytest.raises(MissingExtraError, match=r"practicum\[vision\]"):
        make_processor(make_vision_tokenizer())
    with pytest.raises(MissingExtraError, match=r"practicum\[vision\]"):
        read_processor(str(tmp_path), make_vision_tokenizer())
