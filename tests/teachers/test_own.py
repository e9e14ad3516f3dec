"""Teachers in separate processes: the same scores, and a bounded end whatever happens.

`tests/engines/test_hosted_engine.py` tests the process itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)

from practicum.engines.hosted_engine import HostedEngine
from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.errors import EngineError, RecipeError, TeacherError
from practicum.models.attention import OutputHead, head_logits
from practicum.models.load_model import load_model
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.teacher_sections import Own, OwnPlacement, StudentCopy, Teacher
from practicum.teachers.teacher_scorer import TeacherScorer
from tests.engines.engines import tiny
from tests.engines.test_hosted_engine import alive
from tests.teachers.models import assert_same, in_process, rows, save_tiny, score_rows, scorer_of

SAMPLED = ScoreOptions()


def teacher_of(folder: Path | str, *, replicas: int = 1, **more: Any) -> Teacher:
    placement = OwnPlacement(own=Own(replicas=replicas))
    return Teacher(model=str(folder), placement=placement, device="cpu", **more)


@contextmanager
def started(spec: Teacher) -> Iterator[TeacherScorer]:
    scorer = scorer_of(spec)
    try:
        for part in scorer.scorers:
            part.ready()
        yield scorer
    finally:
        scorer.close()


def engines_of(scorer: TeacherScorer) -> list[HostedEngine]:
    return [part for part in scorer.scorers if isinstance(part, HostedEngine)]


def pids_of(scorer: TeacherScorer) -> list[int]:
    return [engine.host.pid for engine in engines_of(scorer)]


def score(scorer: TeacherScorer, some: list[ScoreRequest], wanted: ScoreOptions = SAMPLED) -> list[Scores]:
    return asyncio.run(score_rows(scorer, some, wanted))


def until(condition: Callable[[], bool], timeout: float = 30.0) -> bool:
    """Wait for something that gives no sign of its own."""
    pause = threading.Event()
    for _ in range(int(timeout / 0.05)):
        if condition():
            return True
        pause.wait(0.05)
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teacher")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    save_tiny(folder)
    return load_model(Model(path=str(folder), device="cpu"), 0)


@pytest.fixture(scope="module")
def own(folder: Path, model: PreTrainedModel) -> Iterator[TeacherScorer]:
    """Two processes that the tests which end none share."""
    with started(teacher_of(folder, replicas=2, batch_tokens=200, context=100)) as teacher:
        yield teacher


@pytest.mark.parametrize(
    "wanted",
    [ScoreOptions(), ScoreOptions(top_k=5), ScoreOptions(top_k=3, hidden=True, temperature=0.7)],
    ids=["sampled", "top-k", "hidden"],
)
def test_scores_are_the_bits_of_an_engine_in_this_process(
    own: TeacherScorer, model: PreTrainedModel, wanted: ScoreOptions
):
    some = rows(20)
    assert_same(score(own, some, wanted), in_process(model, some, wanted))


def test_both_processes_get_rows(own: TeacherScorer):
    slots = own._dispatcher.slots
    before = [slot.total_load for slot in slots]
    score(own, rows(8))
    assert all(slot.total_load > load for slot, load in zip(slots, before, strict=True))
    assert all(slot.load == 0 for slot in slots)
    assert own.busy_s > 0


def test_head_and_hidden_states_give_the_whole_distribution(own: TeacherScorer, model: PreTrainedModel):
    row = rows(1, shortest=40)[0]
    scores = score(own, [row], ScoreOptions(hidden=True))[0]
    assert scores.hidden is not None
    head = own.scorers[0].head()
    target_R1 = torch.tensor(row.ids[row.start :]).unsqueeze(-1)
    logprobs_R = head.logits(scores.hidden).log_softmax(-1).gather(-1, target_R1).squeeze(-1)
    torch.testing.assert_close(logprobs_R, scores.logprobs, rtol=0, atol=1e-5)
    assert torch.equal(head.weight, OutputHead.of(model).weight)


def test_a_row_the_model_can_not_score_fails_alone_with_its_name(own: TeacherScorer):
    with pytest.raises(TeacherError, match=r"teacher math .*prompt 7: .*token ids outside"):
        score(own, [ScoreRequest([5, 100_000, 6], 1, "prompt 7"), *rows(3)])
    with pytest.raises(TeacherError, match=r"teacher math .*prompt 9: 101 tokens exceed its context of 100"):
        score(own, [ScoreRequest([5] * 101, 1, "prompt 9")])
    assert len(score(own, rows(3))) == 3


def test_cancelled_rows_are_forgotten(own: TeacherScorer):
    async def cancel() -> None:
        tasks = [asyncio.ensure_future(own.score(row, ScoreOptions(top_k=20))) for row in rows(40)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in done)

    asyncio.run(cancel())
    assert all(slot.load == 0 for slot in own._dispatcher.slots)
    assert len(score(own, rows(4))) == 4


def test_new_weights_change_the_scores_of_every_process(own: TeacherScorer):
    other, some, wanted = tiny(seed=3), rows(8), ScoreOptions(top_k=2)
    own.take({name: p.detach() for name, p in other.named_parameters()}, 5)
    try:
        got = score(own, some, wanted)
        assert_same(got, in_process(other, some, wanted))
        assert {scores.version for scores in got} == {5}
        assert torch.equal(own.scorers[0].head().weight, OutputHead.of(other).weight)
    finally:
        own.take({name: p.detach() for name, p in tiny().named_parameters()}, 0)


@pytest.mark.long
def test_a_copy_of_the_student_is_its_start():
    with started(Teacher(student=StudentCopy(), placement="own")) as own:
        model = own.scorers[0].memory()  # pyright: ignore[reportAttributeAccessIssue]
        assert model.weights > 0
        assert own.held is not None
        assert own.held.weights is None


@pytest.mark.parametrize("scaling", ["logit_scale", "logits_scaling", "final_logit_softcapping"])
def test_the_head_alone_gives_the_models_logits(scaling: str):
    model = tiny()
    setattr(model.config, scaling, 0.7)
    head = OutputHead.of(model)
    hidden_MH = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    expected = head_logits(model, hidden_MH)
    assert torch.equal(head.logits(hidden_MH), expected)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()  # pyright: ignore[reportCallIssue]
    assert torch.equal(head.logits(hidden_MH), expected), "the head is a copy"


def test_the_head_alone_reads_the_scalings_of_the_text_config():
    text = Gemma3TextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.7, initializer_range=0.5,
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision)).eval()
    hidden_MH = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = OutputHead.of(model).logits(hidden_MH)
        assert torch.equal(found, head_logits(model, hidden_MH))
    assert 0.5 < float(found.abs().max()) <= 0.7, "the cap of the text config holds"


def test_a_start_that_fails_is_named_and_leaves_no_process(tmp_path: Path):
    scorer = scorer_of(teacher_of(tmp_path / "nothing"))
    with pytest.raises((RecipeError, EngineError), match=r"teachers\.math"):
        scorer.scorers[0].ready()
    assert not any(alive(pid) for pid in pids_of(scorer))


@pytest.mark.long
def test_a_process_killed_in_mid_request_fails_its_rows_immediately(folder: Path, model: PreTrainedModel):
    some = rows(3)

    async def kill_meanwhile(own: TeacherScorer) -> None:
        (pid,) = pids_of(own)
        os.kill(pid, signal.SIGSTOP)  # so that the rows are surely in flight
        tasks = [asyncio.ensure_future(own.score(row, SAMPLED)) for row in some]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in tasks)
        os.kill(pid, signal.SIGKILL)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for row, error in zip(some, done, strict=True):
            assert isinstance(error, TeacherError)
            assert all(words in str(error) for words in ("teacher math", row.name, "SIGKILL"))

    # The deadline is far away: only the death itself can be what ends the wait.
    with started(teacher_of(folder, deadline_s=3600.0)) as own:
        asyncio.run(kill_meanwhile(own))
        with pytest.raises(TeacherError, match=r"prompt 0/session 0: .*ended \(by signal SIGKILL"):
            score(own, some[:1])


@pytest.mark.long
def test_a_process_that_hangs_is_killed_at_the_deadline_and_not_used_again(
    folder: Path, model: PreTrainedModel
):
    with started(teacher_of(folder, replicas=2, deadline_s=3.0)) as own:
        other, hung = pids_of(own)  # rows go to the first process first
        os.kill(hung, signal.SIGSTOP)
        with pytest.raises(TeacherError, match=r"teacher math did not answer for prompt 1"):
            score(own, rows(2))
        assert until(lambda: not alive(hung))
        assert alive(other)
        with pytest.raises(TeacherError, match=r"teacher math .*was killed"):
            score(own, rows(3))
