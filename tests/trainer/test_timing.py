"""The same run, to the last bit, with sessions of several turns that arrive at the engine at any time."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest

from practicum.engines.protocol import GenerateRequest, Generation
from practicum.engines.torch.model_runner import ModelRunner
from practicum.engines.torch.torch_engine import TorchEngine
from practicum.trainer.run import train_loaded

from .recipes import TINY, tiny
from .test_run import metrics_of, same_run, stop_after

TOKEN = {"algorithm": {"mismatch": "token"}}
ROLLOUT = {"algorithm": {"old_logprobs": "rollout"}, "train": TINY["train"] | {"minibatches": 2}}
REFILLS = {"refills": 50, "reward": {"functions": [{"use": "tests.trainer.rewards:even_length"}]}}
FEW_SLOTS = {"rollout": TINY["rollout"] | {"max_num_seqs": 5}}


def delay_turns(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Requests come to the engine after a random time of up to 10 ms."""
    delays, generate = Random(seed), TorchEngine.generate

    async def delayed(self: TorchEngine, request: GenerateRequest) -> Generation:
        await asyncio.sleep(0.01 * delays.random())
        return await generate(self, request)

    monkeypatch.setattr(TorchEngine, "generate", delayed)


def whole_and_resumed(folder: Path, seed: int, *overrides: str, **sections: Any) -> list[dict[str, Any]]:
    """Train at once, and stopped after a step and resumed, each with other delays; the metrics of both."""
    for name, delays in (("whole", seed), ("cut", seed + 1)):
        with pytest.MonkeyPatch.context() as patch:
            delay_turns(patch, delays)
            if name == "cut":
                stop_after(patch, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
            train_loaded(tiny(folder, *overrides, **sections), folder / name)
    train_loaded(tiny(folder, *overrides, **sections), folder / "cut", resume=True)
    same_run(folder / "whole", folder / "cut")
    return metrics_of(folder / "whole")[1:]


def run_of_turns(folder: Path, loop: str, sections: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    overrides = ["train.steps=2", "eval.rows=2"]
    agent = {"loop": loop, "message": "no"} if loop == "retry" else {"loop": loop}
    return whole_and_resumed(folder, seed, *overrides, agent=agent, **(FEW_SLOTS | sections))


@pytest.mark.parametrize(
    ("loop", "sections"),
    [("retry", TOKEN), ("tests.trainer.loops:uneven", ROLLOUT | REFILLS)],
    ids=["retry-token", "uneven-refilled-rollout"],
)
def test_a_run_of_several_turns_is_the_same_with_any_timing(tmp_path: Path, loop: str, sections: dict):
    rows = run_of_turns(tmp_path, loop, sections, seed=0)
    assert all(row["rollout/turns"] > 1 for row in rows)
    assert all(row["train/gap_max"] == 0.0 for row in rows)


def see_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's numbers depend on how many tokens it computes at once, as on other processors."""
    hidden = ModelRunner.hidden

    def seen(self: ModelRunner, inputs: Any, layout: Any, *parts: Any, **wanted: Any) -> Any:
        return hidden(self, inputs, layout, *parts, **wanted) * (1 + 1e-5 * (len(inputs.ids_N) // 4 % 5))

    monkeypatch.setattr(ModelRunner, "hidden", seen)


@pytest.mark.parametrize(
    ("loop", "sections"),
    [
        ("retry", TOKEN),
        pytest.param("tests.trainer.loops:uneven", ROLLOUT | REFILLS, marks=pytest.mark.long),
        pytest.param("tests.trainer.loops:asks_a_helper", TOKEN, marks=pytest.mark.long),
    ],
    ids=["retry-token", "uneven-refilled-rollout", "contexts-token"],
)
def test_a_run_is_the_same_where_numbers_depend_on_the_batch(
    tmp_path: Path, loop: str, sections: dict, monkeypatch: pytest.MonkeyPatch
):
    see_the_batch(monkeypatch)
    rows = run_of_turns(tmp_path, loop, sections, seed=0)
    assert all(row["train/gap_max"] > 0.0 for row in rows)
    assert "each is computed alone" in (tmp_path / "whole/log.txt").read_text()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 22, 2))
@pytest.mark.parametrize("sections", [TOKEN, ROLLOUT, TOKEN | REFILLS], ids=["token", "rollout", "refilled"])
def test_many_timings(tmp_path: Path, sections: dict, seed: int):
    for loop in ("retry", "tests.trainer.loops:uneven", "tests.trainer.loops:asks_a_helper"):
        folder = tmp_path / loop.rsplit(":", maxsplit=1)[-1]
        folder.mkdir()
        run_of_turns(folder, loop, sections, seed)
