"""Convert images to model inputs with transformers' processors, created in code or loaded from folders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2_5_VLProcessor

from practicum.compat.transformers import is_vision_available, pil_image_processor
from practicum.errors import MissingExtraError, RecipeError
from practicum.models.model_files import must_read, read_config, read_image_processor
from practicum.models.tokenizer import make_tokenizer
from practicum.models.vision import Images, is_vision
from practicum.recipe.schema.recipe import Model

if TYPE_CHECKING:
    from PIL.Image import Image

VISION: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 1}
"""Image settings of random vision models: an image token stands for 8 × 8 pixels."""
_PIXELS: dict[str, Any] = {"min_pixels": 8 * 8, "max_pixels": 64 * 64}
VISION_SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Processor(Qwen2_5_VLProcessor):
    """Qwen-VL's processor for text and images. Its part for videos would need torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=tokenizer.chat_template)


def make_vision_tokenizer() -> PreTrainedTokenizerFast:
    """Return the character tokenizer with tokens for images, and a chat template that places them."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(VISION_SPECIALS), special_tokens=True)
    tokenizer.chat_template = _CHAT
    return tokenizer


def make_processor(tokenizer: PreTrainedTokenizerBase) -> Processor:
    if not is_vision_available():
        raise MissingExtraError("a vision model", "vision")
    return Processor(pil_image_processor(**VISION, **_PIXELS), tokenizer)


def load_processor(spec: Model, tokenizer: PreTrainedTokenizerBase) -> Processor | None:
    """Return the processor of the recipe's model, or None for a model that takes no images."""
    if spec.random_init is not None:
        if spec.random_init.family != "qwen2_5_vl":
            return None
        _require_image_token(tokenizer, "model.tokenizer", spec.tokenizer or "the built-in tokenizer")
        return make_processor(tokenizer)
    assert spec.path is not None
    return read_processor(spec.path, tokenizer) if is_vision(read_config(spec.path)) else None


def read_processor(source: str, tokenizer: PreTrainedTokenizerBase, key: str = "model.path") -> Processor:
    """Return the processor of a vision model's folder or hub name. `key` is for errors."""
    if not is_vision_available():
        raise MissingExtraError(f"the vision model {source}", "vision")
    with must_read(source, key, "a vision model with preprocessor_config.json or processor_config.json"):
        cutter = read_image_processor(source)
    if "image_grid_thw" not in cutter.model_input_names or not hasattr(cutter, "merge_size"):
        expected = "one that cuts images into a grid of patches, as Qwen2-VL's and its followers' do"
        raise RecipeError(key, f"{source} with {type(cutter).__name__}", expected)
    _require_image_token(tokenizer, key, source)
    return Processor(cutter, tokenizer)


def _require_image_token(tokenizer: PreTrainedTokenizerBase, key: str, source: str) -> None:
    for token in VISION_SPECIALS[:3]:
        if token not in tokenizer.get_vocab():
            raise RecipeError(key, f"{source} without the token {token}", "the tokenizer of a vision model")


def encode_images(processor: Processor, pictures: Sequence[Image]) -> tuple[Images, list[int]]:
    """Return the images as the model reads them, and how many image tokens stand for each."""
    cut = processor.image_processor(images=list(pictures), return_tensors="pt")
    images = Images(cut["pixel_values"], cut["image_grid_thw"])
    merged = processor.image_processor.merge_size**2
    return images, (images.grid.prod(dim=1) // merged).tolist()


def expand_images(ids: Sequence[int], image_token: int, counts: Sequence[int]) -> list[int]:
    """Return the ids with each image token repeated as often as its image needs."""
    assert sum(i == image_token for i in ids) == len(counts)
    rest = iter(counts)
    return list(chain.from_iterable(repeat(i, next(rest)) if i == image_token else (i,) for i in ids))
