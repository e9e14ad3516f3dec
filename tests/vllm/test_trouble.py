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
from practicum.recipe.schema.recipe import Recipe
from practicum.roles.sync import make_engines
from tests.engines.engines import sampling
from tests.vllm.models import await_true, descendants, make_tiny, save_model, setup_of


def engine_processes() -> set[int]:
    """Processes of this one, but for the one that multiprocessing keeps."""
    there = descendants(os.getpid())
    return {pid for pid in there if "resource_tracker" not in command(pid)}


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return "resource_tracker"  # it has ended meanwhile


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = engine_processes()
    yield
    assert engine_processes() <= before


def start(model: dict[str, Any] | None = None, **rollout: Any) -> None:
    """An engine as a recipe's run makes it, with the weights of its student."""
    recipe = Recipe.model_validate(
        {
            "name": "trouble",
            "model": {"make": {"hidden": 64}},
            "tasks": {"sort": {"kind": "sort"}},
            "rollout": {"engine": "vllm", "max_new_tokens": 8, "slots": 4} | rollout,
        }
    )
    student = make_tiny(**model or {})
    make_engines(recipe.rollout, recipe.model.path, [student], lambda: (student.named_parameters(), 0))[
        0
    ].close()


@pytest.mark.parametrize(
    ("model", "rollout", "words"),
    [
        pytest.param(
            {"head_dim": 24},
            {},
            r"head size on this device \(it lists 32, 64, .*\): use rollout\.engine: torch, .*head_dim=24",
            id="head size",
        ),
        pytest.param(
            {},
            {"vllm": {"options": {"kv_cache_memory_bytes": 10_000}}},
            r"too small for one sequence of 128 tokens: raise kv_cache_memory_bytes in "
            r"rollout\.vllm\.options, or lower rollout\.context",
            id="KV memory",
        ),
        pytest.param(
            {},
            {"vllm": {"options": {"gpu_memory": 1}}},
            r"rollout\.vllm\.options has a name that vLLM does not know: .*gpu_memory",
            id="options",
        ),
    ],
)
def test_what_vllm_can_not_do_is_told_when_it_starts(
    model: dict[str, Any], rollout: dict[str, Any], words: str
):
    with pytest.raises(EngineError, match=words) as caught:
        start(model, **rollout)
    assert len(str(caught.value)) < 700


def test_a_context_beyond_the_models_is_told(tmp_path: Path):
    save_model(tmp_path)
    with pytest.raises(
        EngineError, match=r"of 999 tokens is longer than the model's: lower rollout\.context"
    ):
        VllmEngine(setup_of(tmp_path, context=999))


def test_an_architecture_that_vllm_does_not_know_is_told(tmp_path: Path):
    save_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "Qwen33ForCausalLM"))
    words = r"vLLM does not know this model: use rollout\.engine: torch\. .*Qwen33ForCausalLM"
    with pytest.raises(EngineError, match=words):
        VllmEngine(setup_of(tmp_path))


def test_a_torchvision_for_another_torch_is_named(tmp_path: Path):
    with (
        pytest.raises(EngineError, match="another torch are in the way: pip uninstall -y torchvision"),
        explain(setup_of(tmp_path), lambda: ""),
    ):
        raise RuntimeError("operator torchvision::nms does not exist")


def test_a_deadline_that_passes_is_told(tmp_path: Path):
    save_model(tmp_path)
    with pytest.raises(EngineError, match=r"not ready after 0\.5 s: raise rollout\.vllm\.start_s"):
        VllmEngine(setup_of(tmp_path), start_s=0.5)


def test_a_process_that_is_killed_while_it_starts_is_named(tmp_path: Path):
    save_model(tmp_path)
    before = engine_processes()
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(VllmEngine, setup_of(tmp_path))
        await_true(lambda: bool(engine_processes() - before))
        (pid,) = engine_processes() - before
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
