from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.engine_work import LOADS, PROMPT_TOKENS, Load, Work, answer_lengths, draw_prompts, make_engine
from benchmarks.engine_work import make_model as make_sized
from benchmarks.harness import Measured
from benchmarks.report_engines import TORCH, VLLM
from benchmarks.vllm_engine import CASES, by_case, check_same, race_cases

from benchmarks import report_engines

MACHINE = {"processor": "a processor", "cores": 2}
SMALL = Load(prompts=2, samples=4, new_tokens=4, scored=2)


@pytest.mark.parametrize("size", ["4M", "135M"])
def test_ragged_answers_have_as_many_tokens_as_equal_ones(size: str) -> None:
    load = LOADS[size]
    equal, ragged = (answer_lengths(load, uneven, 3) for uneven in (False, True))
    assert sum(equal) == sum(ragged)
    assert len(set(equal)) == 1
    assert len(set(ragged)) > 3
    assert answer_lengths(load, True, 3) == ragged != answer_lengths(load, True, 4)


def test_lengths_that_can_not_be_shared_out_are_refused() -> None:
    with pytest.raises(ValueError, match="9 answers"):
        answer_lengths(Load(3, 3, 8, 0), True, 0)


def test_prompts_of_a_turn_are_the_same_in_every_process_and_others_differ() -> None:
    first = draw_prompts(SMALL, 63, 1)
    assert first == draw_prompts(SMALL, 63, 1) != draw_prompts(SMALL, 63, 2)
    assert all(PROMPT_TOKENS[0] <= len(ids) <= PROMPT_TOKENS[1] for ids in first)


def test_every_case_runs_and_counts_its_tokens() -> None:
    model = make_sized("4M")
    threads = torch.get_num_threads()
    engine = make_engine(TORCH, model, 8, threads)
    try:
        work = Work(engine, model, SMALL)
        found = {name: run(1) for name, run in work.cases.items()}
    finally:
        engine.close()
    assert set(CASES) < set(found)
    assert found["equal"]["tokens"] == found["ragged"]["tokens"] == 32
    assert found["score, top-32"]["tokens"] == 2 * 128
    assert found["sync"]["bytes"] == 4 * sum(p.numel() for p in model.parameters())
    assert found["rest"]["wake"] > 0


def test_engines_that_answer_differently_give_no_result() -> None:
    ours = {"tokens": [1, 2, 3, 4], "logprobs": [-1.0, -2.0]}
    assert check_same("4M", [ours, ours])["agree"] == 1.0
    with pytest.raises(ValueError, match="4M: not the same work"):
        check_same("4M", [ours, ours, ours | {"tokens": [1, 2, 3, 5]}])
    with pytest.raises(ValueError, match="not the same work"):
        check_same("4M", [ours, ours | {"logprobs": [-1.0, -2.1]}])


def test_turns_are_sorted_by_the_case_that_each_was() -> None:
    turns: list[Measured] = [{"seconds": float(i)} for i in range(4)]
    found = by_case({"a": turns}, ("x", "y"))
    assert found == {"x": {"a": [turns[0], turns[2]]}, "y": {"a": [turns[1], turns[3]]}}
    assert by_case({"a": turns[:3]}, ("x", "x", "y"))["x"] == {"a": turns[:2]}


def test_a_case_that_would_always_begin_with_the_same_contender_is_refused() -> None:
    contenders: list[Any] = [None, None]
    with pytest.raises(ValueError, match="same contender"):
        race_cases(contenders, ("a", "b"), 1)


def test_the_report_sets_the_engines_beside_each_other() -> None:
    quick: Measured = {"seconds": 1.0, "cpu_seconds": 1.0, "tokens_per_second": 3000.0}
    slow: Measured = {"seconds": 2.0, "cpu_seconds": 2.0, "tokens_per_second": 1500.0}
    sent = [{"seconds": 0.5, "memcpy": 0.01, "bytes": 5e8}]
    found = {
        "machine": MACHINE,
        "settings": {"rounds": 1},
        "raced": {"1 thread, 4M, ragged": {TORCH: [quick], VLLM: [slow]}},
        "same": {"4M": {"tokens": 2048.0, "agree": 1.0, "largest_difference": 2e-6}},
        "synced": {"1 thread, 135M, sync": {TORCH: sent, VLLM: sent}},
        "rested": {
            VLLM: [{"sleep": 0.1, "wake": 11.0, "mb_before": 800.0, "mb_asleep": 500.0, "mb_after": 801.0}]
        },
        "neighbours": {"2 threads": [{"alone": 2000.0, "both": 3000.0, "gain": 1.5}]},
    }
    told = report_engines.vllm_engine(found)
    assert "| 4M | rollout, ragged lengths | 1 thread |" in told
    assert "| 2.00 (2.00 to 2.00) |" in told
    assert "100.00% of 2,048 greedy tokens" in told
    half = "500.0 (500.0 to 500.0)"
    assert f"| 135M | 500 | 1 thread | 10.0 | {half} | {half} | 50.0 (50.0 to 50.0) |" in told
    assert "| vLLM | 0.100 (0.100 to 0.100) | 11.000 (11.000 to 11.000) | 800 | 500 | 801 |" in told
    assert "| 2 threads | 2,000 (2,000 to 2,000) | 3,000 (3,000 to 3,000) | 1.50 (1.50 to 1.50) |" in told
    assert "a processor, 2 cores; medians of 1 round," in told
    assert "busy, no contender" not in told
