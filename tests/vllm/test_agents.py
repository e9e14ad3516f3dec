"""An agent behind the endpoint, whose turns vLLM samples."""

from __future__ import annotations

from pathlib import Path

from practicum.trainer.run import train_loaded
from tests.trainer.recipes import TINY, tiny
from tests.trainer.test_run import metrics_of
from tests.vllm.test_lag import sections


def test_an_agent_trains_on_what_vllm_samples(tmp_path: Path):
    agent = {"loop": {"function": "tests.trainer.test_agents:asks"}}
    train = TINY["train"] | {"steps": 2}
    train_loaded(tiny(tmp_path, **sections(0, agent=agent, train=train)), tmp_path / "run")
    rows = metrics_of(tmp_path / "run")[1:]
    assert [(row["agent/requests"], row["rollout/failed"]) for row in rows] == [(16, 0)] * 2
    assert all(row["rollout/tokens"] > 16 for row in rows)
