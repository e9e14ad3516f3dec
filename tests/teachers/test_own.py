"""Teachers in processes of their own: the same scores, and a bounded end whatever happens."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)

from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.errors import TeacherError
from practicum.models.attention import OutputHead, head_logits
from practicum.models.load_model import load_model
from practicum.places.model_processes import ModelFacts
from practicum.places.place import score_rows
from practicum.places.torch_teacher import OwnTeacher
from practicum.recipe.schema.recipe import MakeModel, Model
from practicum.recipe.schema.teacher_sections import Own, OwnPlacement, Teacher
from tests.engines.engines import tiny
from tests.teachers.models import assert_same, in_process, rows, save_tiny

START_S = 100.0


def teacher_of(folder: Path | str, *, replicas: int = 1, threads: int = 1, **more: Any) -> Teacher:
    placement = OwnPlacement(own=Own(replicas=replicas, threads=threads))
    return Teacher(model=str(folder), placement=placement, device="cpu", **more)


@contextmanager
def started(folder: Path | str, **more: Any) -> Iterator[OwnTeacher]:
    own = OwnTeacher("math", teacher_of(folder, **more))
    own.start()
    try:
        own.ready(START_S)
        yield own
    finally:
        own.close()


def score(own: OwnTeacher, some: list[ScoreRequest], wanted: ScoreOptions = ScoreOptions()) -> list[Scores]:  # noqa: B008
    return asyncio.run(score_rows(own, some, wanted))


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits for its parent to notice its end does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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
def own(folder: Path, model: PreTrainedModel) -> Iterator[OwnTeacher]:
    """Two processes that the tests which end none share."""
    with started(folder, replicas=2, batch_tokens=200) as teacher:
        yield teacher


@pytest.mark.parametrize(
    "wanted",
    [ScoreOptions(), ScoreOptions(top_k=5), ScoreOptions(top_k=3, hidden=True, temperature=0.7)],
    ids=["sampled", "top-k", "hidden"],
)
def test_scores_are_the_bits_of_an_engine_in_this_process(
    own: OwnTeacher, model: PreTrainedModel, wanted: ScoreOptions
):
    some = rows(20)
    assert_same(score(own, some, wanted), in_process(model, some, wanted))


def test_both_processes_get_rows(own: OwnTeacher):
    before = [replica.busy_s for replica in own._replicas]
    score(own, rows(8))
    after = [replica.busy_s for replica in own._replicas]
    assert all(b > a for a, b in zip(before, after, strict=True))
    assert own.busy_s == sum(after)
    assert all(replica.waiting_tokens == 0 for replica in own._replicas)


def test_facts_of_the_model(own: OwnTeacher):
    assert own.facts() == ModelFacts(context=128, threads=1)


def test_head_and_hidden_states_give_the_whole_distribution(own: OwnTeacher, model: PreTrainedModel):
    row = rows(1, shortest=40)[0]
    scores = score(own, [row], ScoreOptions(hidden=True))[0]
    assert scores.hidden is not None
    logits_RV = own.head().logits(scores.hidden)
    target_R1 = torch.tensor(row.ids[row.start :]).unsqueeze(-1)
    logprobs_R = logits_RV.log_softmax(-1).gather(-1, target_R1).squeeze(-1)
    torch.testing.assert_close(logprobs_R, scores.logprobs, rtol=0, atol=1e-5)
    assert torch.equal(own.head().weight, OutputHead.of(model).weight)


def test_a_row_without_response_tokens_has_empty_scores(own: OwnTeacher):
    empty = ScoreRequest([5, 6, 7], 3, "prompt 0")
    scores = score(own, [empty], ScoreOptions(top_k=4, hidden=True))[0]
    assert scores.topk_ids is not None
    assert scores.topk_logprobs is not None
    assert scores.hidden is not None
    assert scores.logprobs.shape == (0,)
    assert scores.topk_ids.shape == scores.topk_logprobs.shape == (0, 4)
    assert scores.hidden.shape == (0, 48)


def test_a_row_the_model_can_not_score_fails_alone_with_its_name(own: OwnTeacher):
    with pytest.raises(TeacherError, match=r"teacher math .*prompt 7: .*token ids outside"):
        score(own, [ScoreRequest([5, 100_000, 6], 1, "prompt 7"), *rows(3)])
    assert len(score(own, rows(3))) == 3


def test_a_row_above_the_context_is_refused(own: OwnTeacher):
    with pytest.raises(TeacherError, match=r"teacher math .*prompt 9: 129 tokens, its context is 128"):
        score(own, [ScoreRequest([5] * 129, 1, "prompt 9")])


def test_cancelled_rows_are_forgotten(own: OwnTeacher):
    async def cancel() -> None:
        tasks = [asyncio.ensure_future(own.score(row, ScoreOptions(top_k=20))) for row in rows(40)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in done)

    asyncio.run(cancel())
    assert all(replica.waiting_tokens == 0 for replica in own._replicas)
    assert len(score(own, rows(4))) == 4


def test_new_weights_change_the_scores_of_every_process(own: OwnTeacher, tmp_path: Path):
    other = tiny(seed=3)
    path = tmp_path / "weights.safetensors"
    save_file({name: p.detach() for name, p in other.named_parameters()}, path)
    old = tmp_path / "old.safetensors"
    save_file({name: p.detach() for name, p in tiny().named_parameters()}, old)
    some, wanted = rows(8), ScoreOptions(top_k=2)
    own.load_weights(path, 5)
    try:
        got = score(own, some, wanted)
        assert_same(got, in_process(other, some, wanted))
        assert {scores.version for scores in got} == {5}
        assert torch.equal(own.head().weight, OutputHead.of(other).weight)
    finally:
        own.load_weights(old, 0)


@pytest.mark.long
def test_a_copy_of_a_made_student_with_threads_and_context_of_the_recipe():
    spec = Model(make=MakeModel(hidden=32, layers=1, heads=2, head_dim=16, context=128), device="cpu")
    placement = OwnPlacement(own=Own(threads=2))
    own = OwnTeacher("copy", Teacher(placement=placement, context=50), model=spec, seed=4)
    own.start()
    try:
        facts = own.ready(START_S)
        assert (facts.threads, facts.context) == (2, 50)
        some = rows(3, longest=30)
        expected = in_process(load_model(spec, 4), some, ScoreOptions())
        for one, other in zip(score(own, some), expected, strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
    finally:
        own.close()


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


def test_a_missing_folder_is_told_by_name_and_leaves_no_process(tmp_path: Path):
    own = OwnTeacher("math", teacher_of(tmp_path / "nothing"))
    own.start()
    with pytest.raises(TeacherError, match=r"teacher math .*teachers\.math\.model: found .*nothing"):
        own.ready(START_S)
    assert not any(alive(pid) for pid in own.pids)


def test_a_start_past_its_deadline_is_told_and_leaves_no_process(folder: Path, model: PreTrainedModel):
    own = OwnTeacher("math", teacher_of(folder))
    own.start()
    with pytest.raises(TeacherError, match=r"teacher math was not ready after 0\.01 s"):
        own.ready(0.01)
    assert not any(alive(pid) for pid in own.pids)


@pytest.mark.long
def test_a_process_killed_in_mid_request_fails_its_rows_at_once(folder: Path, model: PreTrainedModel):
    some = rows(3)

    async def kill_meanwhile(own: OwnTeacher) -> None:
        os.kill(own.pids[0], signal.SIGSTOP)  # so that the rows are surely under way
        tasks = [asyncio.ensure_future(own.score(row, ScoreOptions())) for row in some]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in tasks)
        os.kill(own.pids[0], signal.SIGKILL)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        for row, error in zip(some, done, strict=True):
            assert isinstance(error, TeacherError)
            assert "teacher math" in str(error)
            assert row.name in str(error)
            assert "SIGKILL" in str(error)

    # The deadline is far away: only the death itself can be what ends the wait.
    with started(folder, deadline_s=3600.0) as own:
        asyncio.run(kill_meanwhile(own))
        with pytest.raises(TeacherError, match=r"prompt 0/session 0: .*ended \(by signal SIGKILL"):
            score(own, some[:1])


@pytest.mark.long
def test_a_process_that_hangs_is_killed_at_the_deadline_and_not_used_again(
    folder: Path, model: PreTrainedModel
):
    with started(folder, replicas=2, deadline_s=3.0) as own:
        other, hung = own.pids  # rows go to the first process first
        os.kill(hung, signal.SIGSTOP)
        with pytest.raises(TeacherError, match=r"teacher math did not answer for prompt 1.* within 3 s"):
            score(own, rows(2))
        assert until(lambda: not alive(hung))
        assert alive(other)
        with pytest.raises(TeacherError, match=r"teacher math .*prompt 0.*did not answer for prompt 1"):
            score(own, rows(1))


@pytest.mark.long
def test_close_ends_even_a_stopped_process_and_fails_rows_under_way(folder: Path, model: PreTrainedModel):
    async def close_meanwhile(own: OwnTeacher) -> None:
        task = asyncio.ensure_future(own.score(rows(1)[0], ScoreOptions()))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(own.close)
        with pytest.raises(TeacherError, match=r"prompt 0/session 0: it was closed"):
            await task

    with started(folder) as own:
        os.kill(own.pids[0], signal.SIGSTOP)
        asyncio.run(close_meanwhile(own))
        assert not any(alive(pid) for pid in own.pids)
        own.close()  # once more is fine


PARENT = """
import sys
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.places.torch_teacher import OwnTeacher

if __name__ == "__main__":
    teacher = Teacher(model=sys.argv[1], placement="own", device="cpu")
    own = OwnTeacher("math", teacher)
    own.start()
    own.ready(100)
    print(*own.pids, flush=True)
    sys.stdin.read()
"""


@pytest.mark.long
def test_a_parent_that_is_killed_leaves_no_process(folder: Path, model: PreTrainedModel, tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 1
        assert all(alive(pid) for pid in pids)
        parent.kill()
    assert until(lambda: not any(alive(pid) for pid in pids))
