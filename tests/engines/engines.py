"""Real tiny models and engines for the tests of this folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.engines.protocol import Counter, GenerateRequest, Generation, Sampling
from practicum.engines.torch.prompt_cache import SequenceCache
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.models.load_model import load_tokenizer, make_model, ready
from practicum.models.vision import Images
from practicum.recipe.schema.recipe import MakeModel, Model

FAMILIES = ("qwen3", "llama", "gpt2")
Request = tuple[Sequence[int], Sampling, Counter]


def tiny(
    family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32, context: int = 128
) -> PreTrainedModel:
    """A random model whose weights are large enough for attention to matter and answers to differ."""
    spec: Any = {"family": family, "hidden": 48, "layers": 2, "heads": 4, "context": context}
    make = MakeModel(**spec)
    model = make_model(make, load_tokenizer(Model(random_init=make)), seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)
    model.to(dtype=dtype)  # pyright: ignore
    return ready(model, torch.device("cpu"))


@contextmanager
def engine_of(
    model: PreTrainedModel,
    slots: int = 16,
    context: int = 96,
    *,
    keep_tokens: int | None = None,
    alone: bool | None = None,
    version: int = 0,
    **more: Any,
) -> Iterator[TorchEngine]:
    """An engine that is closed at the end; its cache may be smaller, and turns confirmed or not."""
    engine = TorchEngine(model, slots=slots, context=context, **more)
    engine.version = engine.scheduler.version = version
    if keep_tokens is not None:
        engine.scheduler.cache = SequenceCache(keep_tokens)
    if alone is not None:
        engine.scheduler.alone = alone
    try:
        yield engine
    finally:
        engine.close()


def prompts(count: int, seed: int = 0, shortest: int = 1, longest: int = 24) -> list[list[int]]:
    """Prompts of various lengths."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=g).tolist()
    return [torch.randint(3, 60, (n,), generator=g).tolist() for n in lengths]


def pictures(model: PreTrainedModel, *sizes: tuple[int, int], seed: int = 0) -> Images:
    """Noise pictures of these heights and widths in image tokens."""
    vision: Any = model.config.vision_config
    merge = vision.spatial_merge_size
    grid = torch.tensor([[1, height * merge, width * merge] for height, width in sizes])
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    noise = torch.randn(int(grid.prod(1).sum()), patch, generator=torch.Generator().manual_seed(seed))
    return Images(noise, grid)


def picture_prompt(model: PreTrainedModel, *sizes: tuple[int, int], seed: int = 0) -> list[int]:
    """Some text, then each picture's tokens and some text behind it."""
    g = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, 60, (3,), generator=g).tolist()
    for height, width in sizes:
        ids += [model.config.image_token_id] * (height * width)
        ids += torch.randint(3, 60, (4,), generator=g).tolist()
    return ids


def plain_inputs(model: PreTrainedModel, ids: Sequence[int], images: Images | None) -> dict[str, Tensor]:
    """What transformers' own forward and `generate` take of a sequence with pictures."""
    inputs = {"input_ids": torch.tensor([list(ids)])}
    if images is None:
        return inputs
    left, token = int(images.grid.prod(1).sum()) // 4, model.config.image_token_id
    kind = inputs["input_ids"] == token
    kind &= kind.cumsum(1) <= left
    return {**inputs, "mm_token_type_ids": kind.int(), **images.as_inputs()}


def sampling(max_new_tokens: int = 16, stop: Iterable[int] = (), **more: Any) -> Sampling:
    return Sampling(max_new_tokens=max_new_tokens, stop=frozenset(stop), **more)


def generate(engine: TorchEngine, requests: Sequence[Request]) -> list[Generation]:
    """All requests at once."""

    async def run() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(GenerateRequest(*request)) for request in requests))

    return asyncio.run(run())


def plain_logprobs(model: PreTrainedModel, prompt: Sequence[int], tokens: Tensor) -> Tensor:
    """Full log distributions [R, V] at each sampled token, by a plain forward of the whole sequence."""
    return plain_forward(model, [*prompt, *tokens.tolist()])[len(prompt) - 1 : -1].log_softmax(-1)


def plain_forward(model: PreTrainedModel, ids: Sequence[int], images: Images | None = None) -> Tensor:
    """Logits [N, V] of a whole sequence by transformers' own forward."""
    with torch.no_grad():
        return model(**plain_inputs(model, ids, images), use_cache=False).logits[0]


def resident() -> int:
    """Bytes of this process in memory."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("this system does not say how much memory a process has")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
