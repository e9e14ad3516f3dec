"""What the torch engine keeps of finished sequences, so that a later turn computes only what is new."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.checks.watch import Watch
from practicum.engines.protocol import Counter, GenerateRequest, Generation
from practicum.engines.torch import prompt_cache
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.errors import EngineError
from practicum.models.experts import routes_of
from practicum.models.vision import Images
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.stage_table import make_plan
from practicum.runtime.local import start_local
from practicum.sessions.attempts import Attempt
from practicum.sessions.session import EnginePolicy
from practicum.tasks.stream import make_stream
from tests.engines.engines import engine_of, picture_prompt, pictures, plain_forward, prompts, sampling, tiny
from tests.sessions.sessions import session_of

FAMILIES = ("qwen3", "gpt2", "qwen3_moe", "qwen2_5_vl")
model_of = cache(tiny)
SIZES = [(), ((2, 3),), ((1, 2), (2, 2))]


@dataclass(slots=True)
class Talk:
    """A conversation: its tokens so far, and each turn with the number of tokens before it."""

    ids: list[int]
    images: Images | None = None
    turns: list[tuple[int, Generation]] = field(default_factory=list)

    def sampled(self) -> list[list[int]]:
        return [made.tokens.tolist() for _, made in self.turns]


def opening(model: PreTrainedModel, number: int) -> Talk:
    """A prompt, of a vision model with no, one or two pictures."""
    if not hasattr(model.config, "vision_config"):
        return Talk(prompts(1, seed=number, shortest=2)[0])
    sizes = SIZES[number % len(SIZES)]
    images = pictures(model, *sizes, seed=number) if sizes else None
    return Talk(picture_prompt(model, *sizes, seed=number), images)


async def say(engine: TorchEngine, talk: Talk, number: int, *, keep: bool = True) -> None:
    """One more turn, greedy in half of the talks, of a length that depends on talk and turn alone; then what
    a tool puts in."""
    turn = len(talk.turns)
    draw = Random(f"{number} {turn}")
    how = sampling(draw.randint(1, 6), greedy=number % 2 == 0)
    known = talk.turns[-1][1].experts if talk.turns else None
    counter = Counter(0, number, 0, turn)
    made = await engine.generate(
        GenerateRequest(talk.ids, how, counter, images=talk.images, experts=known, keep=keep)
    )
    talk.turns.append((len(talk.ids), made))
    talk.ids += made.tokens.tolist() + [draw.randint(3, 59) for _ in range(draw.randint(0, 5))]


def converse(engine: TorchEngine, count: int, turns: int, *, keep: bool = True) -> list[Talk]:
    """Several conversations at once, each at its own pace."""
    talks = [opening(engine.model, number) for number in range(count)]

    async def one(number: int) -> None:
        for _ in range(turns):
            await say(engine, talks[number], number, keep=keep)

    async def run() -> None:
        await asyncio.gather(*map(one, range(count)))

    asyncio.run(run())
    return talks


def plain(model: PreTrainedModel, talk: Talk) -> tuple[Tensor, Tensor | None]:
    """Log distributions and experts of all tokens by transformers' own forward."""
    routes = routes_of(model)
    if routes is None:
        return plain_forward(model, talk.ids, talk.images).log_softmax(-1), None
    with routes.record() as taken:
        return plain_forward(model, talk.ids).log_softmax(-1), taken.tensor()


def check_logprobs(all_NV: Tensor, start: int, made: Generation) -> None:
    """A turn's logprobs are those of a plain forward."""
    here_RV = all_NV[start - 1 : start - 1 + len(made.tokens)]
    expected = here_RV.gather(1, made.tokens.unsqueeze(1)).squeeze(1)
    assert torch.allclose(made.plain_logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_later_turns_have_the_logprobs_and_experts_of_a_plain_forward(family: str):
    model, checked = model_of(family), 0
    with engine_of(model, slots=4) as engine:
        talks = converse(engine, 9, 5)
        assert engine.stats.reused_tokens > engine.stats.prefilled_tokens
    for talk in talks:
        if talk.images and model.config.image_token_id in [i for turn in talk.sampled() for i in turn]:
            continue  # which transformers' forward would take for a picture
        checked += 1
        all_NV, experts_N = plain(model, talk)
        for start, made in talk.turns:
            check_logprobs(all_NV, start, made)
            assert (made.experts is None) == (experts_N is None)
            if experts_N is not None and made.experts is not None:
                assert made.experts.shape == (start + len(made.tokens) - 1, 2, 2)
                assert torch.equal(
                    made.experts.sort(-1).values, experts_N[: len(made.experts)].sort(-1).values
                )
    assert checked > 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_computes_only_what_is_new(family: str):
    model = model_of(family)
    talk = opening(model, 2)
    with engine_of(model) as engine:
        first = len(talk.ids)
        asyncio.run(say(engine, talk, 2))
        known = first + len(talk.turns[0][1].tokens) - 1
        asked = len(talk.ids)
        asyncio.run(say(engine, talk, 2))
        assert engine.stats.reused_tokens == known
        assert engine.stats.prefilled_tokens == first + asked - known
        assert engine.stats.prefilled_prompts == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_an_engine_that_keeps_nothing(family: str):
    """Also with too few slots, and with so little room that most is forgotten before it is needed."""
    reused: list[int] = []
    samples: list[list[list[list[int]]]] = []
    for slots, keep_tokens in ((32, 0), (32, None), (4, 150)):
        with engine_of(model_of(family), slots=slots, keep_tokens=keep_tokens) as engine:
            samples.append([talk.sampled() for talk in converse(engine, 12, 5)])
            reused.append(engine.stats.reused_tokens)
    assert samples[1] == samples[2] == samples[0]
    assert reused[1] > reused[2] > reused[0] == 0


def test_hundreds_of_turns_are_those_of_an_engine_that_keeps_nothing():
    with engine_of(model_of("qwen3"), slots=64) as engine:
        expected = [talk.sampled() for talk in converse(engine, 64, 6, keep=False)]
    with engine_of(model_of("qwen3"), slots=16, keep_tokens=64 * 96) as engine:
        assert [talk.sampled() for talk in converse(engine, 64, 6)] == expected
        assert engine.stats.reused_tokens > engine.stats.prefilled_tokens


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_what_older_weights_computed_is_never_used(family: str):
    other, talk = tiny(family, seed=1), opening(model_of("qwen3"), 3)
    with engine_of(tiny(family)) as engine:
        asyncio.run(say(engine, talk, 3))
        engine.load_weights(other.state_dict().items(), 1)
        asyncio.run(say(engine, talk, 3))
        assert engine.stats.reused_tokens == 0
    check_logprobs(plain(other, talk)[0], *talk.turns[1])


def test_kept_memory_is_counted_and_freed_by_sleep():
    with engine_of(model_of("qwen3"), slots=2, context=64) as engine:
        empty, talk = engine.memory().kv, opening(engine.model, 3)
        asyncio.run(say(engine, talk, 3))
        known = talk.turns[0][0] + len(talk.turns[0][1].tokens) - 1
        assert engine.memory().kv - empty == known * empty // (2 * 64)
        assert engine.sleep().kv == empty + known * empty // (2 * 64)
        assert engine.memory().kv == 0
        engine.wake()
        assert engine.memory().kv == empty
        asyncio.run(say(engine, talk, 3))
        assert engine.stats.reused_tokens == 0


def test_nothing_is_kept_unless_asked_and_after_a_failure_or_the_end(monkeypatch: pytest.MonkeyPatch):
    with engine_of(model_of("qwen3")) as engine:
        empty, talk = engine.memory().kv, opening(engine.model, 3)
        asyncio.run(say(engine, talk, 3, keep=False))
        assert engine.memory().kv == empty
        asyncio.run(say(engine, talk, 3))
        assert engine.memory().kv > empty
        with monkeypatch.context() as broken:
            broken.setattr(engine.scheduler, "_collect", lambda *_: 1 / 0)
            with pytest.raises(EngineError, match="failed"):
                asyncio.run(say(engine, talk, 3))
        assert engine.memory().kv == empty
        reused = engine.stats.reused_tokens
        asyncio.run(say(engine, talk, 3))
        assert engine.stats.reused_tokens == reused
        assert engine.memory().kv > empty
    assert engine.memory().kv == 0


def test_a_turn_under_other_pictures_goes_on_from_nothing():
    model = model_of("qwen2_5_vl")
    ids, first, second = (
        picture_prompt(model, (2, 2)),
        pictures(model, (2, 2)),
        pictures(model, (2, 2), seed=1),
    )
    talk, other = Talk(list(ids), first), Talk(list(ids), second)
    with engine_of(model) as engine:
        asyncio.run(say(engine, talk, 0))
        other.ids, talk.ids = list(talk.ids), [*talk.ids, 7]
        asyncio.run(say(engine, other, 0))
        assert engine.stats.reused_tokens == 0
        asyncio.run(say(engine, talk, 0))
        assert engine.stats.reused_tokens == len(ids) + len(talk.turns[0][1].tokens) - 1


def test_a_turn_that_is_to_take_other_experts_goes_on_from_nothing():
    """And what it is told of the tokens behind a kept sequence, they take."""
    ids, how = [5, 9, 11, 13], sampling(4)
    with engine_of(model_of("qwen3_moe")) as engine:

        def ask(ids: list[int], experts: Tensor | None) -> Tensor:
            request = engine.generate(GenerateRequest(ids, how, Counter(0, 0), experts=experts, keep=True))
            made = asyncio.run(request)
            assert made.experts is not None
            ids += made.tokens.tolist()
            return made.experts

        first = ask(ids, None)
        asked = torch.cat([first, (first[-1:] + 1) % 8])
        ask([*ids, 7], torch.cat([first[:-1], (first[-1:] + 1) % 8]))
        assert engine.stats.reused_tokens == 0
        assert torch.equal(ask([*ids], asked)[: len(asked)].sort(-1).values, asked.sort(-1).values)
        assert engine.stats.reused_tokens == len(first)


def test_equal_hashes_of_other_tokens_are_reported_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_cache, "_hashes", lambda ids, pictures: [7] * len(ids))
    with engine_of(model_of("qwen3")) as engine:
        expected = [talk.sampled() for talk in converse(engine, 8, 4, keep=False)]
        assert [talk.sampled() for talk in converse(engine, 8, 4)] == expected


def test_equal_sequences_are_kept_once_and_serve_each_of_their_sessions():
    prompt = [5, 9, 11, 13]

    async def turn(engine: TorchEngine, ids: list[int], length: int, count: int) -> list[Generation]:
        how = sampling(length, greedy=True)
        return await asyncio.gather(
            *(engine.generate(GenerateRequest(ids, how, Counter(0, 0, i), keep=True)) for i in range(count))
        )

    with engine_of(model_of("qwen3"), slots=2) as engine:
        made = asyncio.run(turn(engine, prompt, 4, 4))[0].tokens.tolist()
        sequences = engine.scheduler.cache
        assert (len(sequences), sequences.tokens) == (1, 7)
        later = [*prompt, *made, 20]
        (alone,) = asyncio.run(turn(engine, [*later, 21], 1, 1))
        assert engine.stats.reused_tokens == 7
        together = asyncio.run(turn(engine, later, 3, 3))
        # Two slots: the third request waits for one, with the prompt as the first two computed it.
        assert engine.stats.reused_tokens == 14
        assert engine.stats.prefilled_prompts == 3
    assert len({tuple(one.tokens.tolist()) for one in together}) == 1
    all_NV = plain_forward(model_of("qwen3"), [*later, 21]).log_softmax(-1)
    assert torch.allclose(alone.plain_logprobs[0], all_NV[-1].max(), atol=1e-5)
    assert torch.allclose(together[2].plain_logprobs[0], all_NV[-2].max(), atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen3_moe"])
def test_turns_that_rewrite_the_last_one_go_on_from_what_is_left_of_it(family: str):
    model = model_of(family)

    def talk(engine: TorchEngine, *, keep: bool) -> list[Generation]:
        ids, made = list(range(3, 23)), []
        for turn in range(4):
            request = GenerateRequest(ids, sampling(6), Counter(0, 0, 0, turn), keep=keep)
            made.append(asyncio.run(engine.generate(request)))
            ids = [*ids, *made[-1].tokens.tolist()[:3], 30 + turn]
        request = GenerateRequest(ids[:24], sampling(6), Counter(0, 0, 0, 4), keep=keep)  # and one goes back
        return [*made, asyncio.run(engine.generate(request))]

    with engine_of(model) as engine:
        expected = talk(engine, keep=False)
        assert engine.stats.reused_tokens == 0
    with engine_of(model) as engine:
        made = talk(engine, keep=True)
        assert engine.stats.reused_tokens == 23 + 27 + 31 + 23
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.logprobs, other.logprobs)


def test_different_prompts_of_one_step_share_what_they_go_on_from():
    """Forks of a session: both find the sequence if they come together, else the first takes it."""
    with engine_of(model_of("qwen3")) as engine:
        talk = opening(engine.model, 4)
        asyncio.run(say(engine, talk, 4))
        forks = [Talk([*talk.ids, 30 + i]) for i in range(3)]

        async def both() -> None:
            await asyncio.gather(*(say(engine, fork, 4 + i) for i, fork in enumerate(forks[:2])))

        asyncio.run(both())
        known = talk.turns[0][0] + len(talk.turns[0][1].tokens) - 1
        assert engine.stats.reused_tokens == 2 * known
        asyncio.run(say(engine, forks[2], 6))
        assert engine.stats.reused_tokens == 2 * known
    for fork in forks:
        check_logprobs(plain(model_of("qwen3"), fork)[0], *fork.turns[0])


def test_abandoned_turns_leave_others_as_they_are():
    with engine_of(model_of("qwen3"), slots=32) as engine:
        expected = [talk.sampled() for talk in converse(engine, 12, 6, keep=False)]
    with engine_of(model_of("qwen3"), slots=3) as engine:
        talks = [opening(engine.model, number) for number in range(12)]

        async def one(number: int) -> None:
            for turn in range(6):
                if turn == 3 and number % 2:
                    request = engine.generate(
                        GenerateRequest(talks[number].ids, sampling(40), Counter(9, number), keep=True)
                    )
                    given_up = asyncio.create_task(request)
                    # Some are given up while they wait, others while they are decoded.
                    await asyncio.sleep(0.002 * number)
                    given_up.cancel()
                await say(engine, talks[number], number)

        async def run() -> None:
            await asyncio.gather(*map(one, range(12)))

        asyncio.run(run())
        assert [talk.sampled() for talk in talks] == expected


@pytest.mark.parametrize("keep", [False, True])
def test_a_policy_says_whether_turns_are_kept(keep: bool):
    with engine_of(model_of("qwen3")) as engine:
        session = session_of("sort:312=", EnginePolicy(engine, keep=keep), context=96, max_new_tokens=6)

        async def run() -> None:
            for new in (None, "=4;", None):
                await session.generate(new, stop=())

        asyncio.run(run())
        assert (engine.stats.reused_tokens > 0) == keep


@pytest.mark.parametrize(("loop", "kept"), [("single_turn", False), ("retry", True)])
def test_a_recipes_agents_keep_their_turns_unless_they_take_just_one(loop: str, kept: bool):
    sections = {
        "name": "t",
        "model": {"random_init": {"hidden": 32, "layers": 2}},
        "tasks": {"sort": {"kind": "sort"}},
        "agent": {"loop": loop},
        "rollout": {"max_num_seqs": 8},
        "runtime": {"threads": 1},
    }
    recipe = Recipe.model_validate(sections)
    roles = start_local(recipe, make_plan(recipe), Watch(recipe.checks, print))
    try:
        drawn = sampling(6, stop=roles.stop)
        attempts = [Attempt(p, 0, drawn) for p in make_stream(recipe.tasks, recipe.seed).take(4)]
        roles.rollout.rollout(attempts, "train", seed=0)
        assert isinstance(roles.engine, TorchEngine)
        assert (roles.engine.stats.reused_tokens > 0) == kept
        assert (roles.engine.scheduler.cache.nbytes > 0) == kept
    finally:
        roles.close()
