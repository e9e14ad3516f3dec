"""`practicum serve` as a process: its line in a recipe, and its ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from practicum.engines.protocol import ScoreOptions, Scores
from practicum.errors import TeacherError
from practicum.places.place import score_rows
from practicum.places.remote_teacher import RemoteTeacher
from practicum.recipe.schema.teacher_sections import Teacher
from tests.teachers.models import in_process, rows, save_tiny


def score(line: str) -> list[Scores]:
    """Scores of some rows by the teacher of this line of a recipe."""

    async def run() -> list[Scores]:
        entry = yaml.safe_load(line)["teachers"]["teacher"]
        teacher = RemoteTeacher("teacher", Teacher(**entry, retries=1))
        try:
            return await score_rows(teacher, rows(4), ScoreOptions(top_k=3))
        finally:
            await teacher.aclose()

    return asyncio.run(run())


@pytest.mark.long
@pytest.mark.slow
def test_its_line_makes_a_teacher_until_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = save_tiny(tmp_path)
    monkeypatch.setenv("PRACTICUM_API_KEY", "s3cret")
    command = [sys.executable, "-m", "practicum", "serve", str(tmp_path), "--engine", "torch"]
    server = subprocess.Popen([*command, "--port", "0", "--threads", "1"], stdout=subprocess.PIPE, text=True)
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
    with pytest.raises(TeacherError, match=r"teacher teacher at .*: no answer after 2 tries: ConnectError"):
        score(line)
    assert "s3cret" not in line
