"""What the torch engine samples: equal to transformers, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch

from practicum.engines.protocol import Counter, Generation
from tests.engines.engines import FAMILIES, engine_of, generate, plain_logprobs, prompts, sampling, tiny

EOS = 1


def same(a: Generation, b: Generation) -> bool:
    return torch.equal(a.tokens, b.tokens) and a.finish == b.finish


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_greedy(family: str):
    model = tiny(family)
    asked, stops = prompts(16), [EOS, *range(5, 63, 9)]
    with engine_of(model, slots=5) as engine:
        settings = sampling(16, stop=stops, greedy=True)
        got = generate(engine, [(p, settings, Counter(0, i)) for i, p in enumerate(asked)])
    assert len({tuple(g.tokens.tolist()) for g in got}) > 8
    assert {g.finish for g in got} == {"stop", "length"}
    for prompt, generation in zip(asked, got, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(  # pyright: ignore[reportCallIssue]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=16,
            eos_token_id=stops,
            pad_token_id=0,
        )
        assert generation.tokens.tolist() == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.float64, 2e-6)])
def test_logprobs_are_those_of_a_plain_forward(family: str, dtype: torch.dtype, tolerance: float):
    """In float32 the largest gap seen is 1e-5; in float64 it is the rounding of the results to float32."""
    model = tiny(family, dtype=dtype)
    asked = prompts(20)
    with engine_of(model, slots=7) as engine:
        settings = sampling(24, stop=[EOS], temperature=1.5, top_k=12)
        got = generate(engine, [(p, settings, Counter(0, i)) for i, p in enumerate(asked)])
    for prompt, generation in zip(asked, got, strict=True):
        plain = plain_logprobs(model, prompt, generation.tokens)
        at = generation.tokens.unsqueeze(-1)
        expected = plain.gather(-1, at).squeeze(-1).float()
        torch.testing.assert_close(generation.plain_logprobs, expected, rtol=0, atol=tolerance)
        best = (plain / 1.5).topk(12)
        assert bool((best.indices == at).any(-1).all())
        expected = (plain / 1.5).gather(-1, at).squeeze(-1) - best.values.logsumexp(-1)
        torch.testing.assert_close(generation.logprobs, expected.float(), rtol=0, atol=tolerance)


def test_samples_depend_on_every_part_of_the_counter():
    counters = [Counter(0, 0), Counter(1, 0), Counter(0, 1), Counter(0, 0, 1), Counter(0, 0, 0, 1)]
    with engine_of(tiny()) as engine:
        got = generate(engine, [([5, 6, 7], sampling(24), counter) for counter in counters])
        again = generate(engine, [([5, 6, 7], sampling(24), counter) for counter in counters])
    assert len({tuple(g.tokens.tolist()) for g in got}) == len(counters)
    assert all(same(a, b) for a, b in zip(got, again, strict=True))


def test_first_tokens_follow_the_model_distribution():
    model = tiny()
    with engine_of(model, slots=256) as engine:
        got = generate(engine, [([9, 8, 7], sampling(1), Counter(3, i)) for i in range(4096)])
    counts = torch.bincount(torch.cat([g.tokens for g in got]), minlength=63).double()
    expected = plain_logprobs(model, [9, 8, 7], torch.tensor([0]))[0].exp().double() * 4096
    common = expected > 5
    chi2 = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum())
    assert freedom > 10
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_rows_with_different_settings_share_a_batch():
    model = tiny()
    kinds = [
        sampling(16),
        sampling(16, greedy=True),
        sampling(9, temperature=0.5),
        sampling(16, stop=range(5, 30), top_p=0.7),
    ]
    requests = [(p, kinds[i % 4], Counter(0, i)) for i, p in enumerate(prompts(16))]
    with engine_of(model) as engine:
        mixed = generate(engine, requests)
        apart = [generate(engine, requests[k::4]) for k in range(4)]
    for i, generation in enumerate(mixed):
        assert same(generation, apart[i % 4][i // 4])


def test_a_stop_token_is_kept_and_ends_the_answer():
    stop = frozenset(range(0, 63, 7))
    with engine_of(tiny()) as engine:
        got = generate(engine, [(p, sampling(40, stop), Counter(0, i)) for i, p in enumerate(prompts(30))])
    for generation in got:
        tokens = generation.tokens.tolist()
        assert not stop & set(tokens[:-1])
        assert (tokens[-1] in stop) == (generation.finish == "stop")
        assert (len(tokens) == 40) or generation.finish == "stop"
    assert sum(g.finish == "stop" for g in got) > 20


def test_length_ends_the_answer_and_the_context_can_be_filled():
    with engine_of(tiny(), context=30) as engine:
        one, full = generate(
            engine, [([5], sampling(1), Counter(0, 0)), ([5, 6, 7], sampling(27), Counter(0, 1))]
        )
    assert (len(one.tokens), one.finish) == (1, "length")
    assert (len(full.tokens), full.finish) == (27, "length")


def test_equal_prompts_are_computed_once_even_if_slots_are_few():
    asked = prompts(5, shortest=4)
    requests = [(p, sampling(8), Counter(0, i, s)) for s in range(6) for i, p in enumerate(asked)]
    for slots in (1, 4, 64):
        with engine_of(tiny(), slots=slots) as engine:
            generate(engine, requests)
            assert engine.stats.prefilled_prompts == 5
            assert engine.stats.prefilled_tokens == sum(map(len, asked))
            assert engine.stats.sampled_tokens == 8 * 30


def test_a_free_slot_is_taken_at_once():
    limits = [3, 12, 5, 9, 1, 7, 4, 11]
    requests = [([5 + i], sampling(n), Counter(0, i)) for i, n in enumerate(limits)]
    with engine_of(tiny(), slots=2) as engine:
        generate(engine, requests)
        stats = engine.stats
    assert stats.most_rows == 2
    # Two slots, each busy at every step until no request waits: the last one ends alone.
    assert stats.decode_steps + 1 <= sum(limits) / 2 + max(limits)
    assert stats.decoded_tokens == sum(limits) - len(limits)


def test_prompts_beyond_the_budget_wait_for_the_next_step():
    requests = [([i] * 10, sampling(6), Counter(0, i)) for i in range(3, 11)]
    with engine_of(tiny(), prefill_tokens=25) as narrow, engine_of(tiny()) as wide:
        for a, b in zip(generate(narrow, requests), generate(wide, requests), strict=True):
            assert same(a, b)
        assert wide.stats.decode_steps == 5
        assert narrow.stats.decode_steps == 8


def test_requests_of_one_moment_start_together():
    with engine_of(tiny(), slots=64) as engine:
        generate(engine, [(p, sampling(10), Counter(0, i)) for i, p in enumerate(prompts(64))])
        assert engine.stats.most_rows == 64
        assert engine.stats.decode_steps == 9


def test_bfloat16_logprobs_are_near_a_plain_forward():
    model = tiny(dtype=torch.bfloat16)
    with engine_of(model) as engine:
        (got,) = generate(engine, [([5, 6], sampling(24), Counter(0, 0))])
    expected = plain_logprobs(model.float(), [5, 6], got.tokens).gather(-1, got.tokens.unsqueeze(-1))
    assert float((got.logprobs - expected.squeeze(-1)).abs().mean()) < 0.1
