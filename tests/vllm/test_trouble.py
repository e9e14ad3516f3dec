"""A vLLM engine that can't start, or dies: an error with the thing and the fix, and no process stays."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from practicum.engines.protocol import Counter, GenerateRequest, ScoreRequest
from practicum.engines.vllm.vllm_engine import VllmEngine
from practicum.engines.vllm.vllm_errors import explain
from practicum.errors import EngineError
from tests.engines.engines import sampling
from tests.vllm.models import await_true, descendants, save_model, setup_of


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = descendants(os.getpid())
    yield
    assert descendants(os.getpid()) <= before


@pytest.mark.parametrize(
    ("model", "setup", "words"),
    [
        ({"hidden": 48}, {}, r"head size on this device .*: use rollout\.engine: torch, .*head_dim=24"),
        ({}, {"kv_bytes": 10_000}, r"too small for one sequence of 128 tokens: raise kv_cache_memory_bytes"),
        ({}, {"options": {"gpu_memory": 1}}, r"rollout\.vllm has a name that .*gpu_memory"),
        ({}, {"context": 999}, r"999 tokens is longer than the model's: lower rollout\.context"),
        ({}, {"start_s": 0.5}, r"not ready after 0\.5 s"),
        ({"family": "unknown"}, {}, r"does not know this model: use rollout\.engine: torch\. .*Qwen33"),
    ],
)
def test_what_vllm_can_not_do_is_reported_when_it_starts(
    tmp_path: Path, model: dict[str, Any], setup: dict[str, Any], words: str
):
    if model.get("family") == "unknown":
        save_model(tmp_path)
        config = tmp_path / "config.json"
        config.write_text(config.read_text().replace("Qwen3ForCausalLM", "Qwen33ForCausalLM"))
    else:
        save_model(tmp_path, **model)
    with pytest.raises(EngineError, match=words) as caught:
        VllmEngine(setup_of(tmp_path, **setup))
    assert len(str(caught.value)) < 700


def test_a_torchvision_for_another_torch_is_named(tmp_path: Path):
    error = explain(RuntimeError("operator torchvision::nms does not exist"), setup_of(tmp_path), "")
    assert "another torch are in the way: pip uninstall -y torchvision" in str(error)


def test_a_process_that_is_killed_while_it_starts_is_named(tmp_path: Path):
    save_model(tmp_path)
    before = descendants(os.getpid())
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(VllmEngine, setup_of(tmp_path))
        await_true(lambda: bool(descendants(os.getpid()) - before))
        (pid,) = descendants(os.getpid()) - before
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=f"starting: its process {pid} ended .*by signal SIGKILL"):
            made.result(60)


def test_a_process_that_is_killed_while_it_works_fails_what_is_under_way_at_once(tmp_path: Path):
    save_model(tmp_path)
    engine = VllmEngine(setup_of(tmp_path, loads=True))
    pid = engine.pid

    async def work() -> list[Any]:
        long = [engine.generate(GenerateRequest([5, 6], sampling(120), Counter(0, n))) for n in range(8)]
        asked = [asyncio.ensure_future(one) for one in long]
        await engine.score(ScoreRequest([5, 6], 1))  # by now, they are under way
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):  # none of them has a deadline of its own
            return await asyncio.gather(*asked, return_exceptions=True)

    for error in asyncio.run(work()):
        assert isinstance(error, EngineError), error
        assert f"a generation: its process {pid} ended (by signal SIGKILL" in str(error)
    with pytest.raises(EngineError, match=f"its process {pid} ended"):
        asyncio.run(engine.score(ScoreRequest([5, 6], 1)))
    engine.close()
