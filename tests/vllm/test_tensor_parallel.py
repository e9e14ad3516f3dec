"""One vLLM engine over two workers: the numbers of one, whole weights in both, and no process stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from practicum.engines.torch.torch_engine import TorchEngine
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.errors import CheckError, EngineError
from practicum.recipe.schema.teacher_sections import Teacher
from tests.teachers.models import scorer_of
from tests.vllm.models import (
    MAKE,
    await_true,
    descendants,
    save_model,
    setup_of,
    started,
    still_there,
    update,
)
from tests.vllm.test_engine import (
    CONTEXT,
    Pair,
    changed,
    generate,
    greedy,
    same_answers,
    same_fingerprint,
    score,
    spoilt,
)

SPLIT: dict[str, int] = {"hidden": 128, "heads": 4, "context": CONTEXT}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two workers, each with half of the heads and of the vocabulary."""
    folder = tmp_path_factory.mktemp("split")
    model = save_model(folder, **SPLIT)
    setup = setup_of(folder, CONTEXT, tensor_parallel=2)
    pair = Pair(VllmEngine(setup, weights=lambda: (model.named_parameters(), 1)), model)
    yield pair
    pair.close()


def test_answers_scores_syncs_and_sleep_are_those_of_one_worker(pair: Pair):
    assert pair.vllm.facts.workers == 2
    assert "with 2 workers" in pair.vllm.describe()[0]
    for version in (1, 2):
        other = changed(pair.model, version)
        pair.load(other, version)
        same_answers(pair, other)
        same_fingerprint(pair.vllm, other)
    rows = [([5, 6, 7, 8, 9], 2), ([3] * 40, 1)]
    for a, b in zip(
        score(pair.vllm, rows, 5, temperature=0.7, vocab=40),
        score(pair.torch_of(other), rows, 5, temperature=0.7, vocab=40),
        strict=True,
    ):
        torch.testing.assert_close(a.topk_logprobs, b.topk_logprobs, rtol=0, atol=2e-5)
    pair.vllm.sleep()
    pair.vllm.wake()
    same_answers(pair)


def test_a_weight_that_is_missing_is_named_and_the_next_whole_load_mends_it(pair: Pair):
    other = changed(pair.model)
    pair.load()
    with pytest.raises(EngineError, match=r"layers\.1\.self_attn\.qkv_proj \(\d+ of \d+ numbers came\)"):
        pair.vllm.load_weights(spoilt(other, "missing"), 2)
    with pytest.raises(EngineError, match="loaded only in part"):
        generate(pair.vllm, greedy([[5, 6]]))
    pair.load(other, 3)
    same_fingerprint(pair.vllm, other)


def processes_of(engine: VllmEngine) -> set[int]:
    workers = descendants(engine.pid)
    assert len(workers) >= 2
    return {engine.pid, *workers}


def test_the_probe_of_a_run_holds_with_two_workers_and_they_end_with_a_killed_engine():
    rollout = {"engine": "vllm", "max_num_seqs": 4, "max_new_tokens": 8, "vllm": {"tensor_parallel_size": 2}}
    with started({"model": {"random_init": MAKE | SPLIT}, "rollout": rollout}) as roles:
        for _ in range(2):
            update(roles.rank.student.learner)
            roles.sync_weights()
        update(roles.rank.student.learner)
        with pytest.raises(CheckError, match="stale or corrupt weights"):
            roles.probe_weights()
        assert isinstance(roles.engine, VllmEngine)
        all_of_it = processes_of(roles.engine)
        os.kill(roles.engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="by signal SIGKILL"):
            roles.sync_weights()
        await_true(lambda: not still_there(all_of_it), 60)


def test_a_teacher_over_two_workers_scores_as_the_torch_engine_until_one_is_killed(tmp_path: Path):
    model = save_model(tmp_path, **SPLIT)
    rows = [([5, 6, 7, 8], 1), ([9] * 30, 2)]
    options = {"tensor_parallel_size": 2}
    teacher = Teacher.model_validate({"model": str(tmp_path), "engine": "vllm", "vllm": options})
    place = scorer_of(teacher, "t", distill={"top_k": 4})
    plain, engine = TorchEngine(model, slots=1, context=CONTEXT), place.sleeper
    assert isinstance(engine, VllmEngine)
    try:
        all_of_it = processes_of(engine)
        for one, two in zip(score(engine, rows, 4), score(plain, rows, 4), strict=True):
            torch.testing.assert_close(one.topk_logprobs, two.topk_logprobs, rtol=0, atol=2e-5)
        os.kill(max(all_of_it - {engine.pid}), signal.SIGKILL)
        with pytest.raises(EngineError):
            [score(engine, rows, 4) for _ in range(100)]  # the engine may not have noticed yet
    finally:
        place.close()
        plain.close()
    await_true(lambda: not still_there(all_of_it), 60)
