"""Sessions that share running sequences: what they sample is what each samples alone, to the last bit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from practicum.engines.protocol import Counter, GenerateRequest, Generation
from practicum.engines.torch.torch_engine import TorchEngine
from tests.engines.engines import engine_of, picture_prompt, pictures, sampling, tiny
from tests.models.families import tiny_family

SESSIONS = 6
KINDS = [
    sampling(9, temperature=0.3),
    sampling(9, temperature=0.3, stop=range(5, 40)),
    sampling(5, top_k=2),
    sampling(7, greedy=True),
]
FAMILIES = ["qwen3", "gpt2", "qwen3_moe", "qwen2_5_vl", "qwen3_5_text"]
model_of = cache(lambda family: tiny_family(family) if family.endswith("_text") else tiny(family))


async def ask(engine: TorchEngine, family: str, number: int, wait: float) -> list[Generation]:
    """Two turns of one of SESSIONS sessions of a prompt."""
    prompt, session = divmod(number, SESSIONS)
    model, ids, images = model_of(family), [7, 8, 9 + prompt], None
    if prompt == 1 and family == "qwen2_5_vl":
        ids, images = picture_prompt(model, (2, 3)), pictures(model, (2, 3))
    made, experts = [], None
    for turn in range(2):
        await asyncio.sleep(wait)
        counter = Counter(0, prompt, session, turn)
        request = GenerateRequest(ids, KINDS[number % 4], counter, images, experts, keep=True)
        made.append(await engine.generate(request))
        ids, experts = [*ids, *made[-1].tokens.tolist()], made[-1].experts
    return made


def ask_all(
    engine: TorchEngine, family: str, numbers: Sequence[int], waits: Sequence[float]
) -> list[Generation]:
    async def run() -> list[list[Generation]]:
        pairs = zip(numbers, waits, strict=True)
        return await asyncio.gather(*(ask(engine, family, number, wait) for number, wait in pairs))

    return [turn for turns in asyncio.run(run()) for turn in turns]


@cache
def alone(family: str, confirmed: bool) -> list[Generation]:
    made: list[Generation] = []
    for number in range(2 * SESSIONS):
        with engine_of(model_of(family), slots=1, keep_tokens=0, alone=confirmed) as engine:
            made += ask_all(engine, family, [number], [0.0])
            assert not engine.stats.shared_tokens
    return made


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])  # no smaller case fails by its timing
@given(
    waits=st.lists(st.sampled_from([0.0, 0.0, 0.002]), min_size=2 * SESSIONS, max_size=2 * SESSIONS),
    slots=st.integers(5, 14),
    confirmed=st.booleans(),  # always where layers carry a state
)
@example(waits=[0.0] * 2 * SESSIONS, slots=2 * SESSIONS, confirmed=False)
def test_shared_sequences_leave_every_bit_as_it_is(
    family: str, waits: list[float], slots: int, confirmed: bool
):
    confirmed = confirmed or family.endswith("_text")
    with engine_of(model_of(family), slots=slots, alone=confirmed) as engine:
        made = ask_all(engine, family, range(2 * SESSIONS), waits)
        if not any(waits) and slots == 2 * SESSIONS:  # otherwise few sessions may meet
            assert engine.stats.shared_tokens > 0
    for one, other in zip(made, alone(family, confirmed), strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert one.finish == other.finish
        assert torch.equal(one.logprobs, other.logprobs)
        assert torch.equal(one.plain_logprobs, other.plain_logprobs)
        if one.experts is not None or other.experts is not None:
            assert torch.equal(one.experts, other.experts)  # pyright: ignore[reportArgumentType]
