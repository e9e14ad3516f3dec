"""The queue in front of the slots."""

from __future__ import annotations

import torch

from practicum.engines.torch.kv_memory import PromptKv
from practicum.engines.torch.prompt_cache import PrefilledPrompt, PromptKey
from practicum.engines.torch.request_queue import Admission, GenerateJob, RequestQueue
from practicum.engines.torch.sampler import Draw
from tests.engines.engines import sampling


def job(*prompt: int) -> GenerateJob:
    return GenerateJob(PromptKey(prompt), sampling(), Draw(), 0)


def computed() -> PrefilledPrompt:
    return PrefilledPrompt(PromptKv(torch.ones(1), torch.ones(1)), torch.ones(1))


def sizes(taken: list[Admission]) -> list[tuple[tuple[int, ...], int]]:
    return [(admission.prompt.ids, len(admission.jobs)) for admission in taken]


def nothing_cached(prompt: PromptKey) -> None:
    return None


def queue_of(*jobs: GenerateJob) -> RequestQueue:
    queue = RequestQueue()
    for each in jobs:
        queue.add(each)
    return queue


def test_equal_prompts_go_together_in_order_of_the_first():
    queue = queue_of(job(1), job(2, 2), job(1), job(3), job(2, 2))
    assert sizes(queue.take(10, 100, nothing_cached)) == [((1,), 2), ((2, 2), 2), ((3,), 1)]
    assert not queue


def test_slots_bound_what_is_taken_and_the_rest_stays():
    queue = queue_of(job(1), job(1), job(1), job(2))
    assert sizes(queue.take(2, 100, nothing_cached)) == [((1,), 2)]
    assert sizes(queue.take(2, 100, nothing_cached)) == [((1,), 1), ((2,), 1)]
    assert queue.take(2, 100, nothing_cached) == []


def test_the_token_budget_bounds_prompts_but_never_blocks_the_first():
    queue = queue_of(job(*[1] * 50), job(*[2] * 4), job(*[3] * 4), job(*[4] * 4))
    assert [len(a.prompt) for a in queue.take(10, 9, nothing_cached)] == [50]
    assert sizes(queue.take(10, 9, nothing_cached)) == [((2,) * 4, 1), ((3,) * 4, 1)]


def test_a_computed_prompt_is_kept_for_those_who_wait_and_costs_nothing():
    queue = queue_of(job(1, 1), job(1, 1), job(2, 2))
    (first,) = queue.take(1, 2, nothing_cached)
    queue.keep(first.prompt, computed())
    second, third = queue.take(2, 2, nothing_cached)
    assert second.computed is not None
    assert third.computed is None
    queue.keep(third.prompt, computed())
    queue.add(job(2, 2))
    assert queue.take(1, 2, nothing_cached)[0].computed is None


def test_abandoned_requests_are_left_out():
    jobs = [job(1), job(2), job(2)]
    queue = queue_of(*jobs)
    jobs[0].abandoned = jobs[2].abandoned = True
    assert sizes(queue.take(10, 100, nothing_cached)) == [((2,), 1)]
    assert not queue
