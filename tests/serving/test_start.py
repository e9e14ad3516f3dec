"""`practicum serve`: what it chooses and refuses before a server runs, and the server as a process."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from practicum.cli import app
from practicum.engines.protocol import ScoreOptions, ScoreRequest, Scores
from practicum.errors import RecipeError, ServeError, TeacherError
from practicum.recipe.schema.teacher_sections import Teacher
from practicum.serving.serve import ServeOptions, announcement, listen, resolve, serve
from practicum.teachers.remote_teacher import RemoteScorer
from tests.models.coverage import save
from tests.teachers.models import in_process, rows, save_tiny, score_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path)  # a context of 128
    return str(path)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"context": 129}, ServeError, "--context 129"),
        ({"api_key": ""}, ServeError, "PRACTICUM_API_KEY"),
        ({"api_key": "schlüssel"}, ServeError, "ASCII"),
        ({"api_key": "k", "no_key": True}, ServeError, "--no-key"),
        ({"model": "./nowhere"}, RecipeError, "MODEL"),
    ],
)
def test_mistakes_are_refused_before_anything_is_loaded(
    folder: str, options: dict[str, Any], error: type[Exception], words: str
):
    given: dict[str, Any] = {"model": folder} | options
    with pytest.raises(error, match=words):
        resolve(ServeOptions(**given))


def test_a_port_in_use_is_refused_and_0_is_a_free_one(folder: str):
    with listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port}"):
            listen("127.0.0.1", port)
    with pytest.raises(ServeError, match="--host"):
        listen("no.such.host.invalid", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = CliRunner().invoke(app, ["serve", folder, "--port", str(taken.getsockname()[1])])
    assert done.exit_code == 2
    assert "--port" in done.output


def test_the_command_line_refuses_an_unknown_dtype(folder: str):
    done = CliRunner().invoke(app, ["serve", folder, "--dtype", "int8"])
    assert done.exit_code == 2
    assert "--dtype is int8" in done.output


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gpu1", ""])
def test_a_server_for_other_machines_needs_a_key(folder: str, host: str):
    with pytest.raises(ServeError, match="PRACTICUM_API_KEY"):
        resolve(ServeOptions(folder, host=host))
    assert "warning" not in announcement(resolve(ServeOptions(folder, host=host, api_key="k")), 8000)
    open_to_all = announcement(resolve(ServeOptions(folder, host=host, no_key=True)), 8000)
    assert "warning" in open_to_all
    assert "0.0.0.0:8000" not in open_to_all


def test_this_machine_needs_no_key(folder: str):
    for host in ("127.0.0.1", "127.0.0.2", "localhost", "::1"):
        assert "warning" not in announcement(resolve(ServeOptions(folder, host=host)), 8000)


def test_a_request_may_be_as_large_as_the_context_needs(folder: str):
    assert resolve(ServeOptions(folder)).max_body == 1 << 20
    assert resolve(ServeOptions(folder, max_body_mb=0.5)).max_body == 1 << 19


def test_the_line_for_a_recipe_is_a_teacher(folder: str):
    first, line = announcement(
        resolve(ServeOptions(folder, name="chat: 7b", api_key="s3cret")), 8123
    ).splitlines()
    teacher = Teacher(**yaml.safe_load(line)["teachers"]["teacher"])
    assert (teacher.url, teacher.model) == ("http://127.0.0.1:8123/v1", "chat: 7b")
    assert (teacher.tokenizer, teacher.api_key_env) == (folder, "PRACTICUM_API_KEY")
    assert "s3cret" not in first + line


def score(line: str) -> list[Scores]:
    """Return the scores of some rows by the teacher of this line of a recipe."""

    async def run() -> list[Scores]:
        entry = yaml.safe_load(line)["teachers"]["teacher"]
        teacher = RemoteScorer("teacher", Teacher(**entry))
        try:
            return await score_rows(teacher, rows(4), ScoreOptions(top_k=3))
        finally:
            await teacher.aclose()

    return asyncio.run(run())


def test_a_model_without_a_maximum_length_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The configs of state-space models have none."""
    save("mamba2", tmp_path)
    found: list[Scores] = []

    def score_and_end(scorer: Any, *rest: Any) -> None:
        found.append(asyncio.run(scorer.engine.score(ScoreRequest(list(range(3, 20)), 3))))
        raise KeyboardInterrupt

    monkeypatch.setattr("practicum.serving.serve.scoring_app", score_and_end)
    serve(ServeOptions(str(tmp_path), port=0, context=64), lambda line: None)
    assert len(found[0].logprobs) == 14


@pytest.mark.long
@pytest.mark.slow
def test_its_line_makes_a_teacher_until_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = save_tiny(tmp_path)
    monkeypatch.setenv("PRACTICUM_API_KEY", "s3cret")
    command = [sys.executable, "-m", "practicum", "serve", str(tmp_path), "--port", "0", "--threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith(f"serving {tmp_path} at http://127.0.0.1:")
        line = server.stdout.readline()
        for got, here in zip(score(line), in_process(model, rows(4), ScoreOptions(top_k=3)), strict=True):
            torch.testing.assert_close(got.logprobs, here.logprobs, rtol=0, atol=1e-5)
        server.send_signal(signal.SIGTERM)
        said, _ = server.communicate(timeout=30)
    finally:
        server.kill()
    assert (server.returncode, said) == (0, "ended\n")
    with pytest.raises(TeacherError, match="ConnectError"):
        score(line)
