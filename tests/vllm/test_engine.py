"""The vLLM engine beside the torch engine, each over the same tiny float32 model.

Logprobs agree within TOLERANCE nats (the weights are ten times those of a new model: the differences are
too), greedy tokens are equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from practicum.engines.protocol import (
    Counter,
    Engine,
    GenerateRequest,
    Generation,
    Memory,
    ScoreOptions,
    ScoreRequest,
    Scores,
)
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.errors import EngineError
from practicum.learning.logprobs import LogprobScorer
from practicum.learning.packed_model import PackedModel
from practicum.models.vision import Images
from practicum.recipe.schema.recipe import Train
from tests.engines.engines import Request, prompts, sampling
from tests.vllm.models import KV_BYTES, make_tiny, resident, save_model, setup_of

TOLERANCE = 2e-5
CONTEXT, VOCAB, BLOCK = 192, 63, 128
PASS = 256
"""Tokens that vLLM computes in one pass."""
T = TypeVar("T")


@dataclass
class Pair:
    """A vLLM engine and its model, which the torch engine has too."""

    vllm: VllmEngine
    model: PreTrainedModel
    others: list[TorchEngine] = field(default_factory=list)

    def torch_of(self, model: PreTrainedModel | None = None) -> TorchEngine:
        self.others.append(TorchEngine(model or self.model, slots=16, context=CONTEXT))
        return self.others[-1]

    def load(self, model: PreTrainedModel | None = None, version: int = 1) -> None:
        self.vllm.load_weights((model or self.model).named_parameters(), version)

    def close(self) -> None:
        for engine in (self.vllm, *self.others):
            engine.close()


@pytest.fixture(scope="module")
def qwen_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Qwen3 with a tied head; it gets its weights again when it wakes."""
    folder = tmp_path_factory.mktemp("qwen")
    model = save_model(folder, context=CONTEXT)
    setup = setup_of(folder, CONTEXT, options={"max_num_batched_tokens": PASS})
    pair = Pair(VllmEngine(setup, weights=lambda: (model.named_parameters(), 1)), model)
    yield pair
    pair.close()


@pytest.fixture
def qwen(qwen_pair: Pair) -> Pair:
    """With its own weights, and nothing in its prefix cache."""
    qwen_pair.load()
    return qwen_pair


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Llama with a head of its own, which vLLM loads from its folder."""
    folder = tmp_path_factory.mktemp("llama")
    model = untied(make_tiny(family="llama", context=CONTEXT))
    model.save_pretrained(folder)
    pair = Pair(VllmEngine(setup_of(folder, CONTEXT, loads=True)), model)
    yield pair
    pair.close()


def untied(model: PreTrainedModel) -> PreTrainedModel:
    """The same architecture with an output head of its own."""
    config = deepcopy(model.config)
    config.tie_word_embeddings = False
    other = type(model)(config).eval()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            given = model.get_parameter(name) if not name.startswith("lm_head") else None
            parameter.copy_(torch.randn_like(parameter) / 5 if given is None else given)
    return other.requires_grad_(False)


def changed(model: PreTrainedModel, seed: int = 7) -> PreTrainedModel:
    """A copy with quite other weights."""
    other, g = deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g) / 10)
    return other


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(120):
            return await work

    return asyncio.run(limited())


def generate(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    async def work() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(GenerateRequest(*request)) for request in requests))

    return run(work())


def greedy(some: Sequence[Sequence[int]], count: int = 16) -> list[Request]:
    return [(prompt, sampling(count, greedy=True), Counter(0, n)) for n, prompt in enumerate(some)]


def score(engine: Engine, rows: Sequence[tuple[Sequence[int], int]], *args: Any, **more: Any) -> list[Scores]:
    async def work() -> list[Scores]:
        return await asyncio.gather(
            *(engine.score(ScoreRequest(*row), ScoreOptions(*args, **more)) for row in rows)
        )

    return run(work())


def rows_of(requests: Sequence[Request], found: Sequence[Generation]) -> list[tuple[list[int], int]]:
    return [
        ([*request[0], *one.tokens.tolist()], len(request[0]))
        for request, one in zip(requests, found, strict=True)
    ]


def close(a: Tensor | None, b: Tensor | None) -> None:
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)


def same_fingerprint(engine: VllmEngine, model: PreTrainedModel) -> None:
    """vLLM's is the learner's, and longer than a block of KV memory."""
    found = engine.fingerprint()
    assert len(found) > engine.facts.block
    close(found, LogprobScorer(PackedModel(model, Train())).fingerprint(len(found) + 1))


def tokens_of(found: Sequence[Generation]) -> list[list[int]]:
    return [one.tokens.tolist() for one in found]


def same_answers(pair: Pair, model: PreTrainedModel | None = None) -> None:
    """Greedy answers and their logprobs are those of the torch engine with this model's weights."""
    asked = greedy(prompts(12))
    here, there = generate(pair.torch_of(model), asked), generate(pair.vllm, asked)
    assert tokens_of(there) == tokens_of(here)
    assert len({tuple(tokens) for tokens in tokens_of(here)}) > 6  # else they would say nothing
    for a, b in zip(there, here, strict=True):
        close(a.logprobs, b.logprobs)
        close(a.plain_logprobs, b.plain_logprobs)


def test_prompts_that_do_not_fit_one_pass_are_sampled_too(qwen: Pair):
    """Seeded samples of prompts that are computed in parts would end vLLM on a CPU."""
    longest = CONTEXT - 16
    asked: list[Request] = [
        (prompt, sampling(), Counter(1, n))
        for n, prompt in enumerate(prompts(6, seed=3, shortest=longest - 20, longest=longest))
    ]
    assert len(asked[0][0]) + len(asked[1][0]) > PASS
    together = tokens_of(generate(qwen.vllm, asked))
    alone = [tokens_of(generate(qwen.vllm, [request]))[0] for request in asked[-3:]]
    assert together[-3:] == alone


def test_greedy_answers_are_the_torch_engines(qwen: Pair):
    same_answers(qwen)
    same_fingerprint(qwen.vllm, qwen.model)


def test_logprobs_of_sampled_tokens_are_those_at_the_temperature_and_at_one(qwen: Pair):
    asked = [(prompt, sampling(temperature=0.6), Counter(0, n)) for n, prompt in enumerate(prompts(12))]
    found = generate(qwen.vllm, asked)
    rows = rows_of(asked, found)
    for name, temperature in (("logprobs", 0.6), ("plain_logprobs", 1.0)):
        scores = score(qwen.torch_of(), rows, temperature=temperature)
        for one, wanted in zip(found, scores, strict=True):
            close(getattr(one, name), wanted.logprobs)


def test_logprobs_after_a_cut_are_those_of_what_was_left(qwen: Pair):
    asked = [
        (prompt, sampling(temperature=1.5, top_k=5), Counter(0, n)) for n, prompt in enumerate(prompts(6))
    ]
    found = generate(qwen.vllm, asked)
    scores = score(qwen.torch_of(), rows_of(asked, found), 5, temperature=1.5)
    for one, wanted in zip(found, scores, strict=True):
        assert wanted.topk_ids is not None
        assert wanted.topk_logprobs is not None
        taken = wanted.topk_ids == one.tokens[:, None]
        assert taken.any(1).all()
        close(one.logprobs, wanted.topk_logprobs.log_softmax(-1)[taken])


def test_a_counter_gives_the_same_tokens_whatever_runs_beside(qwen: Pair):
    some = prompts(4)
    asked: list[Request] = [
        (prompt, sampling(24, temperature=1.3), Counter(3, n, session))
        for n, prompt in enumerate(some)
        for session in range(3)
    ]
    others: list[Request] = [(prompt, sampling(9), Counter(9, n)) for n, prompt in enumerate(prompts(8, 5))]
    together = tokens_of(generate(qwen.vllm, [*others[:4], *asked, *others[4:]]))[4 : 4 + len(asked)]
    alone = [tokens_of(generate(qwen.vllm, [one]))[0] for one in asked]
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) == len(asked)


def test_samples_of_a_long_prompt_share_its_blocks_and_are_those_of_lonely_ones(qwen: Pair):
    prompt = prompts(1, seed=2, shortest=BLOCK + 12, longest=BLOCK + 12)[0]
    asked: list[Request] = [(prompt, sampling(), Counter(1, 0, session)) for session in range(4)]
    generate(qwen.vllm, asked[:1])  # its first block is kept now
    shared = generate(qwen.vllm, asked)
    for one, again in zip(asked, shared, strict=True):
        qwen.load()  # nothing is kept
        lonely = generate(qwen.vllm, [one])[0]
        assert again.tokens.tolist() == lonely.tokens.tolist()
        close(again.logprobs, lonely.logprobs)


def test_answers_end_at_a_stop_token_which_is_kept_or_at_the_limit(qwen: Pair):
    asked = greedy(prompts(6))
    for request, whole in zip(asked, generate(qwen.vllm, asked), strict=True):
        assert (len(whole.tokens), whole.finish) == (16, "length")
        stop = int(whole.tokens[5])
        first = whole.tokens.tolist().index(stop)
        cut = (request[0], sampling(16, [stop, VOCAB - 1], greedy=True), request[2])
        found = generate(qwen.vllm, [cut])[0]
        assert found.finish == "stop"
        assert found.tokens.tolist() == whole.tokens[: first + 1].tolist()
        assert len(found.logprobs) == len(found.plain_logprobs) == first + 1


@pytest.mark.parametrize(
    ("top_k", "temperature", "vocab"), [(0, 1.0, None), (0, 0.5, 40), (7, 1.0, None), (7, 1.7, 40)]
)
def test_scores_are_the_torch_engines(qwen: Pair, top_k: int, temperature: float, vocab: int | None):
    g = torch.Generator().manual_seed(4)
    rows = [(torch.randint(0, 40, (n,), generator=g).tolist(), n // 3) for n in (3, 17, 60, BLOCK + 9)]
    found = [
        score(engine, rows, top_k, temperature=temperature, vocab=vocab)
        for engine in (qwen.vllm, qwen.torch_of())
    ]
    for (ids, start), a, b in zip(rows, *found, strict=True):
        assert a.logprobs.shape == (len(ids) - start,)
        close(a.logprobs, b.logprobs)
        assert (a.topk_ids is None) == (top_k == 0)
        if top_k:
            close(a.topk_logprobs, b.topk_logprobs)
            assert torch.equal(a.topk_ids, b.topk_ids)  # pyright: ignore[reportArgumentType]


def test_scores_with_different_settings_can_be_asked_for_at_once(qwen: Pair):
    ids, settings = prompts(1, shortest=20)[0], [(1.0, None), (0.5, None), (2.0, 60), (1.0, 61)] * 3

    async def work(engine: Engine) -> list[Scores]:
        return await asyncio.gather(
            *(
                engine.score(ScoreRequest(ids, 2), ScoreOptions(top_k=3, temperature=heat, vocab=vocab))
                for heat, vocab in settings
            )
        )

    for a, b in zip(run(work(qwen.vllm)), run(work(qwen.torch_of())), strict=True):
        close(a.logprobs, b.logprobs)
        close(a.topk_logprobs, b.topk_logprobs)


def test_requests_that_can_not_be_done_fail_alone_with_the_reason(qwen: Pair):
    vllm, one = qwen.vllm, Counter(0, 0)
    image = Images(torch.zeros(1, 1), torch.tensor([[1, 1, 1]]))
    cases: list[tuple[Coroutine[Any, Any, object], str]] = [
        (vllm.generate(GenerateRequest([5, VOCAB], sampling(), one)), "token ids"),
        (vllm.generate(GenerateRequest([5] * 180, sampling(), one)), "context"),
        (vllm.generate(GenerateRequest([5], sampling(), one, images=image)), "torch engine"),
        (vllm.score(ScoreRequest([5] * CONTEXT, 1)), f"{CONTEXT} tokens"),
        (vllm.score(ScoreRequest([5, 6], 1), ScoreOptions(top_k=VOCAB + 1)), "top_k"),
        (vllm.score(ScoreRequest([5, 6], 1), ScoreOptions(hidden=True)), "torch engine"),
    ]

    async def work() -> tuple[Generation, list[object]]:
        good = asyncio.ensure_future(vllm.generate(GenerateRequest([5, 6, 7], sampling(greedy=True), one)))
        errors = await asyncio.gather(*(case for case, _ in cases), return_exceptions=True)
        return await good, list(errors)

    good, errors = run(work())
    for (_, words), error in zip(cases, errors, strict=True):
        assert isinstance(error, EngineError), error
        assert words in str(error)
    assert good.tokens.tolist() == tokens_of(generate(qwen.torch_of(), greedy([[5, 6, 7]])))[0]


def test_a_request_that_is_cancelled_leaves_the_engine_to_others(qwen: Pair):
    async def work() -> None:
        asked = [
            asyncio.ensure_future(
                qwen.vllm.generate(GenerateRequest([5, 6], sampling(CONTEXT - 2), Counter(0, n)))
            )
            for n in range(4)
        ]
        asked.append(asyncio.ensure_future(qwen.vllm.score(ScoreRequest([5, 6], 1))))  # type: ignore
        await asked[-1]  # by now, the others are under way
        for load in (qwen.load, qwen.vllm.sleep):
            with pytest.raises(EngineError, match="with 4 requests in flight"):
                load()
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    run(work())
    qwen.load()  # would be refused if vLLM still worked on them
    same_answers(qwen)


def test_new_weights_of_a_tied_model_are_used_immediately(qwen: Pair):
    generate(qwen.vllm, greedy([prompts(1, shortest=BLOCK + 20, longest=BLOCK + 20)[0]]))
    other = changed(qwen.model)
    qwen.load(other, 5)
    same_answers(qwen, other)
    same_fingerprint(qwen.vllm, other)
    long = greedy([prompts(1, shortest=BLOCK + 20, longest=BLOCK + 20)[0]])
    found = generate(qwen.vllm, long)
    assert tokens_of(found) == tokens_of(generate(qwen.torch_of(other), long))
    assert qwen.vllm.version == found[0].version_min == found[0].version_max == 5
    assert score(qwen.vllm, [([5, 6], 1)])[0].version == 5


def test_a_llama_with_a_head_of_its_own_starts_from_its_folder_and_takes_new_weights(llama: Pair):
    same_answers(llama)
    assert generate(llama.vllm, greedy([[5]]))[0].version_max == 0
    other = changed(llama.model)
    llama.load(other, 1)
    same_answers(llama, other)
    with pytest.raises(EngineError, match="without a source of weights can't sleep"):
        llama.vllm.sleep()
    weights = sum(p.nbytes for p in other.parameters())
    # vLLM's vocabulary is padded to a multiple of 64, and a packed head beside the plain one.
    padded = (64 - VOCAB) * 64 * 4
    assert llama.vllm.memory().weights >= weights + other.get_parameter("lm_head.weight").nbytes + 3 * padded
    assert llama.vllm.memory().weights < 1.5 * weights
    block = 2 * 2 * 32 * BLOCK * 4  # keys and values of two layers
    assert KV_BYTES - block <= llama.vllm.memory().kv <= KV_BYTES


def test_a_tied_weight_may_come_under_its_other_name_too_and_in_any_order(qwen: Pair):
    other = changed(qwen.model)
    named = list(reversed(other.state_dict().items()))
    assert "lm_head.weight" in dict(named)
    qwen.vllm.load_weights(named, 2)
    same_fingerprint(qwen.vllm, other)


def test_experts_take_new_weights(tmp_path: Path):
    model = save_model(tmp_path, family="qwen3_moe", context=CONTEXT)
    pair = Pair(VllmEngine(setup_of(tmp_path, CONTEXT)), model)
    try:
        for version in (1, 2):  # the second is loaded over weights that are packed
            other = changed(model, version)
            pair.load(other, version)
            same_fingerprint(pair.vllm, other)
    finally:
        pair.close()


def spoilt(model: PreTrainedModel, how: str) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model, of which one is unknown, misshapen or missing, or fails to be made."""
    for name, tensor in model.named_parameters():
        if "layers.1.self_attn.k_proj" not in name:
            yield name, tensor
        elif how == "unknown":
            yield name.replace("k_proj", "x_proj"), tensor
        elif how == "misshapen":
            yield name, tensor[:-1]
        elif how == "broken":
            raise ArithmeticError("the learner has gone")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("unknown", r"layers\.1\.self_attn\.x_proj"),
        ("misshapen", r"layers\.1\.self_attn\.k_proj\.weight \[31, 64\]"),
        ("missing", r"layers\.1\.self_attn\.qkv_proj \(\d+ of \d+ numbers came\)"),
        ("broken", "the learner has gone"),
    ],
)
def test_a_load_that_fails_midway_is_named_and_the_next_whole_one_mends_it(qwen: Pair, how: str, words: str):
    other = changed(qwen.model)
    with pytest.raises(ArithmeticError if how == "broken" else EngineError, match=words):
        qwen.vllm.load_weights(spoilt(other, how), 2)
    for ask in (lambda: generate(qwen.vllm, greedy([[5, 6]])), lambda: score(qwen.vllm, [([5, 6], 1)])):
        with pytest.raises(EngineError, match="load all of them"):
            ask()
    assert qwen.vllm.version == 1
    qwen.load(other, 3)
    same_answers(qwen, other)
    assert qwen.vllm.version == 3


def test_asleep_it_holds_no_memory_and_awake_the_answers_are_the_same(qwen: Pair):
    asked: list[Request] = [(prompt, sampling(), Counter(0, n)) for n, prompt in enumerate(prompts(6))]
    before, pid = tokens_of(generate(qwen.vllm, asked)), qwen.vllm.pid
    assert qwen.vllm.sleep().kv > 0
    assert qwen.vllm.memory() == Memory(0, 0)
    for ask in (lambda: generate(qwen.vllm, asked), qwen.load, qwen.vllm.fingerprint, qwen.vllm.sleep):
        with pytest.raises(EngineError, match="sleeps"):
            ask()
    qwen.vllm.wake()
    assert tokens_of(generate(qwen.vllm, asked)) == before
    assert (qwen.vllm.version, qwen.vllm.pid) == (1, pid)
    awake = resident(pid)
    qwen.vllm.sleep()
    assert resident(pid) < awake - 0.8 * KV_BYTES
    qwen.vllm.wake()
    qwen.vllm.wake()  # nothing to do
    assert tokens_of(generate(qwen.vllm, asked)) == before
