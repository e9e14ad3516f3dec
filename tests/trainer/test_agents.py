"""Agents behind the endpoint in whole runs: the same update as the built-in loop, lags and failures too."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from practicum.sessions.endpoint.programs import AgentTask
from practicum.trainer.run import train_loaded

from .recipes import TINY, tiny
from .test_run import metrics_of, same_run, stop_after, weights_of
from .test_sessions import samples_of

HERE = "tests.trainer.test_agents"
REWARD = {"functions": [{"use": "tests.trainer.rewards:by_letters"}]}


def asks(task: AgentTask) -> None:
    """An agent of one turn."""
    headers = {"authorization": f"Bearer {task.api_key}"}
    body = {"model": task.model, "messages": task.messages, "temperature": 0.2}
    httpx2.post(f"{task.base_url}/chat/completions", json=body, headers=headers).raise_for_status()


def fails_at_times(task: AgentTask) -> float:
    """An agent that raises for half of the prompts."""
    asks(task)
    if len(task.prompt) % 2:
        raise ValueError("an odd prompt")
    return float(len(task.prompt) % 4)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The run's metrics without those of time and of requests."""
    kept = [
        {k: v for k, v in row.items() if not k.startswith(("time/", "agent/", "shared/"))}
        for row in metrics_of(folder)
    ]
    return [{k: v for k, v in row.items() if "per_second" not in k} for row in kept]


@pytest.mark.parametrize("lag", [0, 1])
def test_an_agent_of_one_turn_trains_as_the_built_in_loop(lag: int, tmp_path: Path):
    for name, loop in (("built_in", "single_turn"), ("agent", {"function": f"{HERE}:asks"})):
        (tmp_path / name).mkdir()
        sections = {"agent": {"loop": loop}, "reward": REWARD, "rollout": TINY["rollout"] | {"lag": lag}}
        train_loaded(tiny(tmp_path / name, **sections), tmp_path / name / "run")
    runs = [tmp_path / name / "run" for name in ("built_in", "agent")]
    assert numbers(runs[0]) == numbers(runs[1])
    ours, theirs = (weights_of(run) for run in runs)
    assert all(ours[name].equal(theirs[name]) for name in ours)
    last = metrics_of(runs[1])[-1]
    assert (last["agent/requests"], last["agent/overridden/temperature"]) == (16, 16)
    (client,) = {request for sample in samples_of(tmp_path / "agent") for request in sample["requests"]}
    assert client.startswith("chat/completions python-httpx")


def test_a_resumed_run_of_an_agent_is_the_run_that_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sections = {"agent": {"loop": {"function": f"{HERE}:asks"}}, "reward": REWARD}
    train_loaded(tiny(tmp_path, **sections), tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        train_loaded(tiny(tmp_path, **sections), tmp_path / "cut")
    train_loaded(tiny(tmp_path, **sections), tmp_path / "cut", resume=True)
    same_run(tmp_path / "whole", tmp_path / "cut")


def test_an_agent_that_raises_fails_its_session_alone(tmp_path: Path):
    train_loaded(tiny(tmp_path, agent={"loop": {"function": f"{HERE}:fails_at_times"}}), tmp_path / "run")
    rows = metrics_of(tmp_path / "run")[1:]
    assert any(0 < row["rollout/failed"] < 16 for row in rows)
    assert "raised ValueError: an odd prompt" in (tmp_path / "run" / "log.txt").read_text()
    assert "OPENAI_API_KEY" not in os.environ
