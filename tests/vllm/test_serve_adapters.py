"""`practicum serve --adapter` with vLLM: a real server on 127.0.0.1 that has a base and two adapters."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import torch
import yaml

from practicum.engines.protocol import ScoreOptions, Scores
from practicum.errors import RecipeError
from practicum.models.load_model import load_model
from practicum.places.remote_teacher import RemoteTeacher, probe_teacher
from practicum.recipe.schema.recipe import Model
from practicum.recipe.schema.teacher_sections import Teacher
from tests.teachers.models import in_process, rows
from tests.teachers.tiny_teachers import save_adapter
from tests.vllm.models import save_model
from tests.vllm.test_serve import KEY, TOLERANCE, end, start

CONTEXT, VOCAB = 96, 63
ROWS, WANTED = rows(12), ScoreOptions(top_k=5)


def test_each_model_of_a_server_says_what_it_does_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows of all three are asked at once: they share the server's passes."""
    base = str(tmp_path / "base")
    save_model(tmp_path / "base")
    models = {name: save_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate("ab")}
    adapters = [f"--adapter={name}={tmp_path / name}" for name in models]
    models["tiny"] = load_model(Model(path=base), 0)
    monkeypatch.setenv("PRACTICUM_API_KEY", KEY)
    process = start(Path(base), "--name", "tiny", "--context", str(CONTEXT), *adapters)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        if not (line := process.stdout.readline()):
            raise AssertionError(end(process)[1])
        entries = yaml.safe_load(line)["teachers"]
        assert {*entries} == {"a", "b"}
        entries["tiny"] = {**entries["a"], "model": "tiny"}
        said = asyncio.run(ask({name: Teacher(**entry) for name, entry in entries.items()}))
    finally:
        process.send_signal(signal.SIGINT)
        end(process)
    for name, model in models.items():
        for got, here in zip(said[name], in_process(model, ROWS, WANTED), strict=True):
            torch.testing.assert_close(got.logprobs, here.logprobs, rtol=0, atol=10 * TOLERANCE)
            torch.testing.assert_close(got.topk_logprobs, here.topk_logprobs, rtol=0, atol=10 * TOLERANCE)
    assert (said["a"][0].logprobs - said["b"][0].logprobs).abs().max() > 0.05
    assert (said["a"][0].logprobs - said["tiny"][0].logprobs).abs().max() > 0.05


async def ask(entries: dict[str, Teacher]) -> dict[str, list[Scores]]:
    teachers = {name: RemoteTeacher(name, entry) for name, entry in entries.items()}
    try:
        await probe_teacher(teachers["a"], WANTED, VOCAB, CONTEXT - 1)
        with pytest.raises(RecipeError, match=f"{CONTEXT} tokens .*expected {CONTEXT + 1} or more"):
            await probe_teacher(teachers["a"], WANTED, VOCAB, CONTEXT)
        asked = [(name, row) for row in ROWS for name in teachers]
        found = await asyncio.gather(*(teachers[name].score(row, WANTED) for name, row in asked))
    finally:
        for teacher in teachers.values():
            await teacher.aclose()
    said: dict[str, list[Scores]] = {name: [] for name in teachers}
    for (name, _), scores in zip(asked, found, strict=True):
        said[name].append(scores)
    return said
