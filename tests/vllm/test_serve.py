"""`practicum serve` with vLLM, and teachers behind vLLM's own server: real ones, on 127.0.0.1.

Logprobs are those of the torch engine within TOLERANCE nats, in float32. (The weights are ten times those of
a new model: the differences are too.)
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
import torch
import yaml
from transformers import PreTrainedModel

from practicum.engines.protocol import ScoreOptions, ScoreRequest
from practicum.errors import RecipeError, TeacherError
from practicum.places.place import score_rows
from practicum.places.remote_teacher import RemoteTeacher, probe_teacher
from practicum.recipe.schema.teacher_sections import Teacher
from tests.teachers.models import in_process, rows
from tests.vllm.models import await_true, descendants, save_model, still_there

TOLERANCE = 2e-5
KEY = "s3cret"
CONTEXT, VOCAB = 96, 63
T = TypeVar("T")


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """`practicum serve` with vLLM, in one thread."""
    command = [sys.executable, "-m", "practicum", "serve", str(folder), "--engine", "vllm"]
    return subprocess.Popen(
        [*command, "--port", "0", "--threads", "1", *options],
        env={**os.environ, "PRACTICUM_API_KEY": KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it said, after it has ended by itself or was killed."""
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()


@dataclass(frozen=True)
class VllmServer:
    process: subprocess.Popen[str]
    teacher: dict[str, Any]
    """The teacher of the line that it printed."""
    model: PreTrainedModel

    def use(self, work: Callable[[RemoteTeacher], Coroutine[Any, Any, T]], **options: Any) -> T:
        async def run() -> T:
            teacher = RemoteTeacher("far", Teacher(**self.teacher | options))
            try:
                return await work(teacher)
            finally:
                await teacher.aclose()

        return asyncio.run(run())

    def probe_teacher(self, *, top_k: int = 5, context: int = CONTEXT - 1, **options: Any) -> None:
        self.use(lambda teacher: probe_teacher(teacher, ScoreOptions(top_k=top_k), VOCAB, context), **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("model")
    model = save_model(folder)
    process = start(folder, "--name", "tiny", "--context", str(CONTEXT))
    assert process.stdout is not None
    process.stdout.readline()
    if not (line := process.stdout.readline()):
        raise AssertionError(end(process)[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRACTICUM_API_KEY", KEY)
        yield VllmServer(process, yaml.safe_load(line)["teachers"]["teacher"], model)
    process.send_signal(signal.SIGINT)
    end(process)


@pytest.mark.parametrize("top_k", [0, 8, VOCAB])
def test_a_teacher_behind_vllm_says_what_a_colocated_one_says(server: VllmServer, top_k: int):
    some, wanted = rows(16), ScoreOptions(top_k=top_k)
    far = server.use(lambda teacher: score_rows(teacher, some, wanted))
    for got, here in zip(far, in_process(server.model, some, wanted), strict=True):
        torch.testing.assert_close(got.logprobs, here.logprobs, rtol=0, atol=TOLERANCE)
        if top_k:
            torch.testing.assert_close(got.topk_logprobs, here.topk_logprobs, rtol=0, atol=TOLERANCE)
        if top_k == 8:
            assert torch.equal(got.topk_ids, here.topk_ids)  # pyright: ignore[reportArgumentType]


def test_its_clients_have_limits(server: VllmServer):
    url = httpx2.URL(server.teacher["url"])
    with socket.create_connection((url.host, url.port or 0), timeout=60) as silent:
        bearer = {"Authorization": f"Bearer {KEY}"}
        large = httpx2.post(f"{url}/completions", content=bytes(2 << 20), headers=bearer, timeout=60)
        assert large.status_code == 413
        assert "larger than the limit of 1,048,576 bytes" in large.json()["error"]["message"]
        strange = httpx2.post(url.join("/tokenize"), json={"model": "tiny", "prompt": "x"}, timeout=60)
        assert strange.status_code == 401, "vLLM itself asks for no key here"
        server.probe_teacher()
        assert silent.recv(65536).startswith(b"HTTP/1.1 408")


def test_the_probe_passes_up_to_the_limits_and_names_what_is_wrong(
    server: VllmServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WRONG_KEY", "other")
    server.probe_teacher(top_k=VOCAB)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"api_key_env": "WRONG_KEY"}, r"teachers\.far\.api_key_env: .*401"),
        ({"api_key_env": None}, r"teachers\.far\.api_key_env: .*401"),
        ({"model": "other"}, r"teachers\.far\.model: found other, expected a model of .*: tiny"),
        ({"context": CONTEXT}, f"{CONTEXT} tokens .*expected {CONTEXT + 1} or more"),
        ({"top_k": VOCAB + 1}, f"refuses top_k {VOCAB + 1} .*expected at most {VOCAB}"),
    )
    for options, words in cases:
        with pytest.raises(RecipeError, match=words):
            server.probe_teacher(**options)


def test_trouble_with_a_row_is_told_with_its_name(server: VllmServer):
    cases: tuple[tuple[list[int], dict[str, Any], str], ...] = (
        ([5] * CONTEXT, {}, f"row 7: its {CONTEXT} tokens and one .*do not fit the server's context"),
        ([5] * (CONTEXT + 9), {}, f"row 7: status 400: .*{CONTEXT} tokens.*{CONTEXT + 9}"),
        ([5, 99_999], {}, "row 7: status 400: .*99999"),
        ([5, 6], {"model": "other"}, "row 7: status 404: .*other"),
        ([5, 6], {"api_key_env": None}, "row 7: status 401"),
    )
    for ids, options, words in cases:
        row = ScoreRequest(ids, 1, "row 7")
        with pytest.raises(TeacherError, match=rf"teacher far at .*{words}"):
            server.use(lambda teacher, row=row: score_rows(teacher, [row], ScoreOptions()), **options)


def test_an_engine_that_dies_in_the_midst_fails_the_rows_and_ends_the_server(server: VllmServer):
    below = descendants(server.process.pid)
    cores = [pid for pid, name in below.items() if "Engine" in name or "Worker" in name]
    assert cores

    async def work(teacher: RemoteTeacher) -> None:
        asked = asyncio.ensure_future(score_rows(teacher, rows(200), ScoreOptions(top_k=VOCAB)))
        await asyncio.sleep(0.2)
        for pid in cores:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await asked

    with pytest.raises(TeacherError, match=r"teacher far at .*prompt \d+/session 0: no answer after 2 tries"):
        server.use(work, retries=1)
    _, said = end(server.process)
    assert server.process.returncode == 2
    assert "\nvllm serve " in said, said
    assert "has ended with exit code" in said
    await_true(lambda: not still_there(below), 20)


@pytest.mark.parametrize(("number", "begun"), [(signal.SIGINT, "python"), (signal.SIGKILL, "Engine")])
def test_nothing_of_a_start_stays_when_it_is_broken_off(tmp_path: Path, number: signal.Signals, begun: str):
    save_model(tmp_path)
    process = start(tmp_path)
    below: dict[int, str] = {}

    def has_begun() -> bool:
        assert process.poll() is None
        below.update(descendants(process.pid))
        return any(begun in name for name in below.values())

    try:
        await_true(has_begun)
    finally:
        process.send_signal(number)
        said, _ = end(process)
    assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGKILL)
    assert said == ("ended\n" if number == signal.SIGINT else "")
    await_true(lambda: not still_there(below), 30)


def test_heads_that_vllm_can_not_compute_are_named_and_nothing_stays(tmp_path: Path):
    save_model(tmp_path, head_dim=8)
    process = start(tmp_path)
    process.wait(300)
    _, said = end(process)
    assert process.returncode == 2
    assert "can't compute attention heads of this model's size on this device: use --engine torch" in said
    assert len(said.splitlines()) < 15
